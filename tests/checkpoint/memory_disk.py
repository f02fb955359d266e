"""A disk in memory that can lose power at any operation, fill up, or fail.

It knows what of a file and which names of a folder were synced. `after_crash` gives a disk as it
may be found after a loss of power: with what was synced, and as much of the rest as one likes.
Copies of a disk (ranks get copies of what they are called with) are the same disk.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.disk.filesystem import FileSystem

_numbers = itertools.count()
_disks: dict[int, MemoryDisk] = {}


class PowerLoss(BaseException):
    """Nothing happens any more."""


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Folder:
    names: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)


class MemoryDisk(FileSystem):
    def __init__(self) -> None:
        self.root = Folder()
        self.number = next(_numbers)
        self.operations: list[str] = []
        self.journal: list[tuple[str, tuple[Any, ...]]] = []
        self.crash_at: int | None = None
        self.fail: Callable[[str, Path], bool] = lambda operation, path: False
        _disks[self.number] = self

    def __reduce__(self) -> Any:
        return _disks.__getitem__, (self.number,)

    def _happens(self, operation: str, path: Path, *details: Any) -> None:
        if self.crash_at is not None and len(self.operations) >= self.crash_at:
            raise PowerLoss(operation)
        self.operations.append(f"{operation} {path.name}")
        self.journal.append((operation, (path, *details)))
        if self.fail(operation, path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    @property
    def is_dying(self) -> bool:
        """Whether the next operation is the last, and may be done by half."""
        return self.crash_at is not None and len(self.operations) == self.crash_at

    def _find(self, path: Path) -> Any:
        node: Any = self.root
        for part in path.parts:
            if not isinstance(node, Folder) or part not in node.names:
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            node = node.names[part]
        return node

    def _has(self, path: Path) -> bool:
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    # Changing ---------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        self._happens("make_folder", path)
        node = self.root
        for part in path.parts:
            node = node.names.setdefault(part, Folder())

    def create(self, path: Path) -> Any:
        self._happens("create", path)
        folder = self._find(path.parent)
        if path.name in folder.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        folder.names[path.name] = file = File()
        return _Writing(self, path, file)

    def sync_folder(self, path: Path) -> None:
        self._happens("sync_folder", path)
        folder = self._find(path)
        folder.synced = dict(folder.names)

    def rename(self, source: Path, target: Path) -> None:
        self._happens("rename", target, source)
        node = self._find(source)
        del self._find(source.parent).names[source.name]
        self._find(target.parent).names[target.name] = node

    def remove_file(self, path: Path) -> None:
        self._happens("remove_file", path)
        self._find(path)
        del self._find(path.parent).names[path.name]

    def remove_folder(self, path: Path) -> None:
        self._happens("remove_folder", path)
        assert not self._find(path).names
        del self._find(path.parent).names[path.name]

    def remove_folder_with(self, path: Path, files: Sequence[Path]) -> None:
        for file in files:
            self.remove_file(file)
        self.remove_folder(path)

    # Looking ----------------------------------------------------------------------------

    def absolute(self, path: Path) -> Path:
        return path

    def followed(self, path: Path) -> Path:
        return path

    def lock(self, path: Path) -> Callable[[], None]:
        return lambda: None  # every disk is used by one save at a time

    def names(self, path: Path) -> list[str]:
        return sorted(self._find(path).names) if self.is_folder(path) else []

    def is_folder(self, path: Path) -> bool:
        return self._has(path) and isinstance(self._find(path), Folder)

    def is_file(self, path: Path) -> bool:
        return self._has(path) and isinstance(self._find(path), File)

    def open(self, path: Path) -> Any:
        file = self._find(path)
        if not isinstance(file, File):
            raise OSError(errno.EISDIR, "Is a directory", str(path))
        return _Reading(file)

    # After a crash ----------------------------------------------------------------------

    def replay(self, count: int) -> MemoryDisk:
        """A disk to which the first operations were done, and half of the next if it is a write."""
        disk = MemoryDisk()
        writing: dict[Path, Any] = {}
        for number, (operation, (path, *details)) in enumerate(self.journal[: count + 1]):
            if number == count:
                if operation == "write":
                    (data,) = details
                    writing[path]._file.data += data[: len(data) // 2]
            elif operation == "create":
                writing[path] = disk.create(path)
            elif operation in ("reserve", "write", "sync"):
                getattr(writing[path], operation)(*details)
            elif operation == "rename":
                disk.rename(*details, path)
            else:
                getattr(disk, operation)(path)
        return disk

    def after_crash(self, *, keep_names: bool, keep_data: str) -> MemoryDisk:
        """``keep_data``: "all", "none" or "half" of what was not synced."""
        disk = MemoryDisk()
        disk.root = _survived(self.root, keep_names, keep_data)
        return disk

    def copy(self) -> MemoryDisk:
        """As it is, synced."""
        return self.after_crash(keep_names=True, keep_data="all")


def _survived(node: Any, keep_names: bool, keep_data: str) -> Any:
    if isinstance(node, Folder):
        names = node.names if keep_names else node.synced
        inner = {name: _survived(each, keep_names, keep_data) for name, each in names.items()}
        return Folder(inner, dict(inner))
    data, synced = bytes(node.data), node.synced
    kept = {"all": data, "none": synced, "half": data[: (len(data) + len(synced)) // 2]}[keep_data]
    return File(bytearray(kept), kept)


class _Writing:
    def __init__(self, disk: MemoryDisk, path: Path, file: File) -> None:
        self._disk, self._path, self._file = disk, path, file

    def reserve(self, num_bytes: int) -> None:
        self._disk._happens("reserve", self._path, num_bytes)

    def write(self, data: Any) -> None:
        if self._disk.is_dying:
            self._file.data += bytes(data)[: len(data) // 2]
        self._disk._happens("write", self._path, bytes(data))
        self._file.data += bytes(data)

    def sync(self) -> None:
        self._disk._happens("sync", self._path)
        self._file.synced = bytes(self._file.data)

    def close(self) -> None:
        pass


class _Reading:
    def __init__(self, file: File) -> None:
        self._file = file
        self.num_bytes = len(file.data)

    def read_into(self, place: int, target: memoryview) -> int:
        data = memoryview(self._file.data)[place : place + len(target)]
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass

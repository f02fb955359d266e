"""All that checkpoints ever do to a disk, as one small interface.

Every write, sync and rename goes through `FileSystem`, so a test can pass one that fills up, fails,
or loses power at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from shoal.system import libc

Buffer = memoryview | bytes
# As much is written before the disk begins with it, so that there is little to wait for in the end.
_EARLY_BYTES = 1 << 24
# A process may open only so many files.
_MOST_OPEN = 32


class Writing(Protocol):
    """A new file that is being written from its beginning to its end."""

    def reserve(self, num_bytes: int) -> None:
        """Says how long it will be: a disk that has no room for it says so now, if it can."""

    def write(self, data: Buffer) -> None:
        """Appends all of it."""

    def sync(self) -> None:
        """Returns once what was written survives a loss of power."""

    def close(self) -> None:
        """Ends it. Twice is fine."""


class Reading(Protocol):
    """A file that is read from any offset."""

    @property
    def num_bytes(self) -> int:
        """Its size when it was opened."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fills ``target`` from an offset on; returns how many bytes there were."""

    def close(self) -> None:
        """Ends it. Twice is fine."""


class FileSystem:
    """The disk of this machine; links inside of a checkpoint are never followed.

    Example:
        >>> disk = FileSystem()
        >>> disk.make_folder(Path("run"))
        >>> file = disk.create(Path("run/note.txt"))
        >>> file.write(b"hello")
        >>> file.sync()
        >>> file.close()
        >>> disk.sync_folder(Path("run"))
    """

    # Changing ---------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        """Makes a folder and those above it; fine if it is there."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> Writing:
        """A new file; an error if the name is taken."""
        return _WrittenFile(path)

    def sync_folder(self, path: Path) -> None:
        """Returns once the names in a folder survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or folder another name; a file of that name is replaced at once."""
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        """Removes a file, or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()

    def remove_folder_with(self, path: Path, files: Sequence[Path]) -> None:
        """Removes a folder and the files in it: names now, what they take up in the background."""
        with kept_open(files):
            for file in files:
                self.remove_file(file)
            with contextlib.suppress(OSError):  # network file systems keep the names of open files
                self.remove_folder(path)
        if self.is_folder(path):
            self.settle()
            self.remove_folder(path)

    def settle(self) -> None:
        """Returns once what was removed has given its room back."""
        wait_until_freed()

    def lock(self, path: Path) -> Callable[[], None]:
        """Locks a folder until the process ends; returns what gives the lock back.

        Raises:
            BlockingIOError: If another process or thread has it.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            pass  # some network file systems have no locks
        return lambda: _unlock(descriptor)

    # Looking ----------------------------------------------------------------------------

    def names(self, path: Path) -> list[str]:
        """What is in a folder; nothing if there is none."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_folder(self, path: Path) -> bool:
        """Whether a path is a folder itself, not a link to one."""
        return stat.S_ISDIR(_mode(path))

    def is_file(self, path: Path) -> bool:
        """Whether a path is a file itself, not a link to one."""
        return stat.S_ISREG(_mode(path))

    def absolute(self, path: Path) -> Path:
        """A path that a change of the working folder does not change."""
        return path.absolute()

    def followed(self, path: Path) -> Path:
        """Where a path leads, if it is a link or goes through some."""
        return Path(os.path.realpath(path))

    def open(self, path: Path) -> Reading:
        """An existing file.

        Raises:
            OSError: If it is not there, or is a link, a pipe or anything but a plain file.
        """
        return _ReadFile(path)


DISK = FileSystem()
"""The disk of this machine."""


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _unlock(descriptor: int) -> None:
    """Unlocks explicitly: a forked child may have the descriptor, so closing is not enough."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class _OpenFile:
    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class _WrittenFile(_OpenFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._num_bytes = self._num_begun = 0

    def reserve(self, num_bytes: int) -> None:
        libc.reserve_blocks(self._descriptor, num_bytes)

    def write(self, data: Buffer) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            count = os.write(self._descriptor, rest)
            self._num_bytes += count
            rest = rest[count:]
        new_bytes = self._num_bytes - self._num_begun
        if new_bytes >= _EARLY_BYTES:
            libc.start_writing(self._descriptor, self._num_begun, new_bytes)
            self._num_begun = self._num_bytes

    def sync(self) -> None:
        os.fsync(self._descriptor)


class _ReadFile(_OpenFile):
    def __init__(self, path: Path) -> None:
        # A pipe would be waited for without end if it were opened to block.
        super().__init__(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(f"{path} is no plain file")

    def read_into(self, offset: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], offset + done)
            if not count:
                break
            done += count
        return done


@contextlib.contextmanager
def opened(disk: FileSystem, path: Path) -> Iterator[Reading]:
    """A file, open inside of the block."""
    file = disk.open(path)
    try:
        yield file
    finally:
        file.close()


def read_all(disk: FileSystem, path: Path, most_bytes: int) -> bytes:
    """A whole file, if it is not larger than it may be.

    Raises:
        ValueError: If it is larger, or ends early.
    """
    with opened(disk, path) as file:
        if file.num_bytes > most_bytes:
            raise ValueError(f"it has {file.num_bytes} bytes, and at most {most_bytes} make sense")
        data = bytearray(file.num_bytes)
        if file.read_into(0, memoryview(data)) != len(data):
            raise ValueError("it ends early")
        return bytes(data)


def write_all(disk: FileSystem, path: Path, data: bytes) -> None:
    """A new file with this content, synced; its name is not."""
    file = disk.create(path)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()


def remove_tree(disk: FileSystem, path: Path) -> None:
    """Removes a folder with all that is in it; links are removed, not followed."""
    inside = [path / name for name in disk.names(path)]
    folders = [inner for inner in inside if disk.is_folder(inner)]
    for folder in folders:
        remove_tree(disk, folder)
    disk.remove_folder_with(path, [inner for inner in inside if inner not in folders])


# Removal ------------------------------------------------------------------------------------
#
# Freeing a large file takes the system a while: memory pages and disk blocks are freed one after
# the other. But a file that is open is freed only when it is closed. So files are opened before
# their names are removed, and a thread closes them: the names are gone at once, and training goes
# on.

_held: set[int] = set()
_threads: set[threading.Thread] = set()


@contextlib.contextmanager
def kept_open(paths: Sequence[Path]) -> Iterator[None]:
    """Inside, removing these files is quick; a thread closes them afterwards."""
    found = [_hold(path) for path in islice(paths, _MOST_OPEN)]
    try:
        yield
    finally:
        _close_in_thread([descriptor for descriptor in found if descriptor is not None])


def wait_until_freed() -> None:
    """Returns once all files are closed."""
    for thread in list(_threads):
        thread.join()
        _threads.discard(thread)


def _hold(path: Path) -> int | None:
    """Opens a file, link or pipe only as a name: nothing is followed or waited for."""
    with contextlib.suppress(OSError, AttributeError):  # systems other than Linux
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        _held.add(descriptor)
        return descriptor
    return None


def _close_in_thread(descriptors: Sequence[int]) -> None:
    if not descriptors:
        return
    thread = threading.Thread(target=_close, args=(descriptors,), name="shoal-free", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process may not start more threads
        _close(descriptors)
    else:
        _threads.add(thread)  # only now: a thread that has not started cannot be joined


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        _held.discard(descriptor)  # first: once closed, the number may be another file's
        os.close(descriptor)


def _close_in_child() -> None:
    """Descriptors that a forked child inherits would keep the files' room for its lifetime."""
    _threads.clear()
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)

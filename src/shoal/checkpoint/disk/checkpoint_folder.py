"""A folder of checkpoints: which there are, which is the latest, how a new one gets in.

[Note: never half]
A checkpoint is written into a folder whose name begins with a dot. Only when all of its files, and
their names, are safe on disk is that folder renamed, in one step, to the name that loaders look
for. Then `LATEST` is replaced, in one step as well. A save that is killed anywhere in between
leaves the checkpoints of before, and at most a folder that no loader reads and that the next save
removes.

Two saves at once would remove and mix up each other's unfinished folders, so a save locks the
folder of checkpoints.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.disk.filesystem import DISK, FileSystem, read_all, remove_tree, write_all
from shoal.errors import CheckpointError, CheckpointWarning
from shoal.system.deadline import save_text

MANIFEST = "manifest.json"
LATEST = "LATEST"
MOST_STEP = 10**20 - 1
_NAME = re.compile(r"(\d{6,12})(?:-step-(\d{1,20}))?")
_LEFTOVER = re.compile(rf"\.(?:new|old|LATEST)-{_NAME.pattern}")
_LOCK_PATIENCE_S = 30.0
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints on some disk.

    Example:
        >>> CheckpointFolder(Path("run")).names()
        ['000001-step-100', '000002-step-200']
    """

    root: Path
    disk: FileSystem = DISK

    def names(self) -> list[str]:
        """All finished checkpoints, the oldest first."""
        found = [
            name
            for name in self.disk.names(self.root)
            if _NAME.fullmatch(name) and self.disk.is_folder(self.root / name)
        ]
        return sorted(found, key=_number)

    def latest(self) -> str | None:
        """What `LATEST` says, if it says something that makes sense."""
        try:
            text = read_all(self.disk, self.root / LATEST, 200).decode("ascii").strip()
        except (OSError, ValueError):
            return None
        return text if _NAME.fullmatch(text) else None

    def candidates(self) -> list[str]:
        """What to load, the best first: what `LATEST` names, then the newest."""
        names = self.names()[::-1]
        latest = self.latest()
        if latest in names:
            names.remove(latest)
            return [latest, *names]
        return names

    # A new one --------------------------------------------------------------------------

    def lock(self) -> Callable[[], None]:
        """Makes the folder, and keeps other saves out of it until what it returns is called."""
        self._make_root()
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                return self.disk.lock(self.root)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(save_text(_LOCK_PATIENCE_S, self.root)) from None
                time.sleep(_LOOK_AGAIN_S)

    def begin(self, step: int | None) -> str:
        """Makes the folder that a new checkpoint is written into; returns its name to be."""
        self.clean()
        self.disk.settle()  # the room is needed
        numbers = [_number(name) for name in self.names()]
        name = f"{max(numbers, default=0) + 1:06d}" + ("" if step is None else f"-step-{step}")
        self.disk.make_folder(self.draft(name))
        return name

    def _make_root(self) -> None:
        """The folder must survive as well: its name is in the folder above, and so on."""
        disk, above = self.disk, (self.root, *self.root.parents)
        missing = [path for path in above if not disk.is_folder(path) and not disk.names(path)]
        disk.make_folder(self.root)
        for path in missing:
            disk.sync_folder(path.parent)

    def draft(self, name: str) -> Path:
        """Where a checkpoint is until it is finished; see [Note: never half]."""
        return self.root / f".new-{name}"

    def commit(self, name: str, manifest: bytes) -> Path:
        """Makes a written checkpoint one that loaders find; its files are synced already."""
        draft, final = self.draft(name), self.root / name
        write_all(self.disk, draft / MANIFEST, manifest)
        self.disk.sync_folder(draft)
        self.disk.rename(draft, final)
        self.disk.sync_folder(self.root)
        pointer = self.root / f".LATEST-{name}"
        write_all(self.disk, pointer, f"{name}\n".encode())
        self.disk.rename(pointer, self.root / LATEST)
        self.disk.sync_folder(self.root)
        return final

    def discard(self, name: str) -> None:
        """Removes what was written of a checkpoint that failed, as far as that is possible."""
        try:
            if self.disk.is_folder(self.draft(name)):
                remove_tree(self.disk, self.draft(name))
        except OSError:
            pass  # the next save tries again, and no loader looks at it

    def clean(self) -> None:
        """Removes what saves that were killed have left behind."""
        for name in self.disk.names(self.root):
            path = self.root / name
            if _LEFTOVER.fullmatch(name):
                if self.disk.is_folder(path):
                    remove_tree(self.disk, path)
                else:
                    self.disk.remove_file(path)

    def prune(self, keep: int) -> None:
        """Removes all but the newest; a failure is only a warning, since the save succeeded."""
        latest = self.latest()
        old = [name for name in self.names()[:-keep] if name != latest]
        try:
            for name in old:
                aside = self.root / f".old-{name}"
                self.disk.rename(self.root / name, aside)
                remove_tree(self.disk, aside)
        except OSError as error:
            warnings.warn(
                f"old checkpoints in {self.root} could not be removed: {error}",
                CheckpointWarning,
                stacklevel=2,
            )


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])

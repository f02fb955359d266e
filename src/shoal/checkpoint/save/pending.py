"""Saves that go on in the background, and how all ranks learn how they ended.

[Note: background saves]
A thread of each rank writes that rank's file. It must not communicate: what it sent would come in
between the training's own collectives, in another order on each rank. So ranks leave *receipts* in
the unfinished checkpoint's folder for the first rank, whose thread finishes the checkpoint when all
are there. The training learns of it at the next call of `save` or `load`, or in `wait`: there the
ranks meet, wait for their own threads, and raise together if any has failed.

A process that ends without that waits for its thread, and says so if the save was lost. Pools of
threads refuse work by then, so nothing that a save does may use one.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.disk.filesystem import read_all, write_all
from shoal.checkpoint.format import strict_json
from shoal.checkpoint.format.manifest import checked, signed
from shoal.checkpoint.format.strict_json import parse
from shoal.checkpoint.save.copy_buffer import CopyBuffer
from shoal.checkpoint.together import caller, together
from shoal.comm import Backend
from shoal.errors import CheckpointError

if TYPE_CHECKING:
    from shoal.checkpoint.save.running_save import RunningSave

_MOST_RECEIPT_BYTES = 1 << 30
_LOOK_AGAIN_S = 0.02
_PATIENCE_AT_EXIT_S = 30.0


class PendingSave:
    """A save that may still be going on.

    Example:
        >>> saving = shoal.save("run", model, optimizer, wait=False)
        >>> train_some_more()
        >>> saving.wait()  # every rank calls it
    """

    def __init__(self, path: Path, finish: Callable[[], None] | None = None) -> None:
        """``finish`` waits for the end, with all ranks, and raises what went wrong."""
        self.path = path
        self._finish = finish

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks know how it ended; that takes a call that all ranks make."""
        return self._finish is None

    def wait(self) -> Path:
        """Returns once the checkpoint is safe on disk; every rank calls it.

        Raises:
            CheckpointError: On every rank, if any has failed.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self.path

    def __repr__(self) -> str:
        """The path, and whether all ranks know how the save ended."""
        return f"<PendingSave {self.path}{'' if self.is_agreed else ', not agreed on yet'}>"


_pending: weakref.WeakKeyDictionary[object, PendingSave] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[object, CopyBuffer] = weakref.WeakKeyDictionary()
"""What the last save has copied into, for the next: memory that is new takes longer to fill."""


def finish_pending(ranks: Backend | None) -> None:
    """Waits for the save that goes on in the background, if there is one; all ranks call it."""
    pending = _pending.pop(caller(ranks), None)
    if pending is not None:
        pending.wait()


def start(save: RunningSave) -> PendingSave:
    """Copies what there is to write, and writes it in the background."""
    who = caller(save.ranks)

    def copy() -> None:
        _copies[who] = save.copy(_copies.pop(who, None))

    with save.discarding():
        together(save.ranks, copy, save.doing)
    background = _Background(save)
    pending = _pending[who] = PendingSave(save.path, background.finish)
    return pending


class _Background:
    """One rank's thread; see [Note: background saves]."""

    def __init__(self, save: RunningSave) -> None:
        self._save = save
        self._receipt: Any = None
        self._error: Exception | None = None
        self._has_written, self._is_cancelled = threading.Event(), threading.Event()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._work, name="shoal-save", daemon=False)
        self._thread.start()

    def _work(self) -> None:
        time.sleep(0)  # lets go of the interpreter: training goes first
        try:
            self._receipt = self._save.write()
            if self._save.rank > 0:
                self._leave_receipt()
        except Exception as error:
            self._error = error
            self._leave_word(error)
        self._save.outgoing = ()
        self._has_written.set()
        if self._save.rank == 0 and self._error is None:
            try:
                self._commit_when_all_have_written()
            except Exception as error:
                self._error = error

    def _path(self, rank: int) -> Path:
        return self._save.folder.draft(self._save.name) / f"receipt-{rank:05d}.json"

    def _leave_receipt(self) -> None:
        """Written under another name and renamed, so that rank 0 never reads half of it."""
        disk, path = self._save.folder.disk, self._path(self._save.rank)
        try:
            write_all(disk, path.with_suffix(".new"), signed(strict_json.encode(self._receipt)))
            disk.rename(path.with_suffix(".new"), path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error}") from error

    def _leave_word(self, error: Exception) -> None:
        """So that the first rank does not wait for what will not come."""
        if self._save.rank != 0:
            self._receipt = {"failed": f"{type(error).__name__}: {error}"}
            with contextlib.suppress(Exception):  # whatever has failed may fail again
                self._leave_receipt()

    def _commit_when_all_have_written(self) -> None:
        receipts = [self._wait_for_receipt(rank) for rank in range(self._save.size)]
        if all(receipt is not None for receipt in receipts):
            self._save.commit(receipts)
            self._save.unlock()

    def _wait_for_receipt(self, rank: int) -> Any:
        """A rank's receipt; None if the save was cancelled meanwhile."""
        if rank == 0:
            return self._receipt
        disk, path = self._save.folder.disk, self._path(rank)
        stall = _StallWatch(lambda: self._save.num_bytes_of(rank))
        while not disk.is_file(path):
            if self._is_cancelled.wait(_LOOK_AGAIN_S):
                return None
            if not threading.main_thread().is_alive() and stall.is_over():
                raise CheckpointError(f"rank {rank} has not written its part of {self._save.path}")
        receipt = parse(checked(read_all(disk, path, _MOST_RECEIPT_BYTES)))
        disk.remove_file(path)  # it is no part of the checkpoint
        if "failed" in receipt:
            raise CheckpointError(f"{self._save.doing} failed on rank {rank}: {receipt['failed']}")
        return receipt

    def finish(self) -> None:
        """With all ranks: waits for the end, and raises on all if any has failed."""
        save = self._save
        atexit.unregister(self._at_exit)
        with save.discarding():
            try:
                if save.ranks is not None:
                    save.ranks.barrier()  # all threads have started, so that waiting ends
                together(save.ranks, self._own_part, save.doing)
                together(save.ranks, self._end, save.doing)
            except BaseException:
                self._is_cancelled.set()
                self._thread.join()
                raise

    def _own_part(self) -> None:
        self._has_written.wait()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _at_exit(self) -> None:
        """The thread has ended, and `wait` was not called."""
        if self._error is not None:
            print(f"shoal: {self._save.path} was not saved: {self._error}", file=sys.stderr)


class _StallWatch:
    """Over when something has stayed the same for too long."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._seen: object = None
        self._since = 0.0

    def is_over(self) -> bool:
        seen, now = self._look(), time.monotonic()
        if seen != self._seen or not self._since:
            self._seen, self._since = seen, now
        return now - self._since > _PATIENCE_AT_EXIT_S

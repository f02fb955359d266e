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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.checkpoint.disk.filesystem import read_all, write_all
from shoal.checkpoint.format.manifest import RECORD, check_signature, signed
from shoal.checkpoint.format.plain_json import parse, to_text
from shoal.checkpoint.save.writing import Outgoing, shares
from shoal.checkpoint.together import PendingSave, caller, note_pending, together
from shoal.errors import CheckpointError
from shoal.torch_support.concurrency import run_concurrently
from shoal.torch_support.memory import copy

if TYPE_CHECKING:
    from shoal.checkpoint.saving import RunningSave

_MOST_RECEIPT_BYTES = 1 << 30
_LOOK_AGAIN_S = 0.02
_PATIENCE_AT_EXIT_S = 30.0
# More threads do not copy faster: memory has its own limit.
_MOST_COPIERS = 4
_ALIGNMENT = 64

_copies: weakref.WeakKeyDictionary[object, Tensor] = weakref.WeakKeyDictionary()
"""Memory that the last save has copied into, for the next: the system clears memory page by page
when it is first touched, which takes longer than filling it does."""


def start(save: RunningSave) -> PendingSave:
    """Copies what there is to write, and writes it in the background."""
    who = caller(save.ranks)

    def copy_all() -> None:
        _copies[who] = _copy_all(save, _copies.pop(who, None))

    with save.discarding():
        together(save.ranks, copy_all, save.doing)
    background = _Background(save)
    return note_pending(save.ranks, PendingSave(save.path, background.finish))


def _copy_all(save: RunningSave, old: Tensor | None) -> Tensor:
    """Copies what this rank writes, so that training can go on; returns the copies' memory."""
    sizes = [-(-each.num_bytes // _ALIGNMENT) * _ALIGNMENT for each in save.outgoing]
    memory = _room(sum(sizes), old)
    copies = []
    for each, begin in zip(save.outgoing, accumulate(sizes, initial=0), strict=False):
        copied = memory[begin : begin + each.num_bytes].view(each.dtype)
        copies.append(replace(each, parts=partial(iter, [copied])))
    count = save.num_threads(_MOST_COPIERS)
    pairs = zip(shares(copies, count), shares(save.outgoing, count), strict=True)
    run_concurrently([partial(_copy, *pair) for pair in pairs])
    save.outgoing = copies
    return memory


def _room(num_bytes: int, old: Tensor | None) -> Tensor:
    if old is not None and num_bytes <= old.numel() <= 2 * num_bytes:
        return old
    with torch.inference_mode(mode=False):  # the next save may not be in it
        return torch.empty(num_bytes, dtype=torch.uint8)


@torch.no_grad()
def _copy(targets: Sequence[Outgoing], sources: Sequence[Outgoing], _: threading.Event) -> None:
    # A GPU's memory is copied to the host at once; waiting for that is all that training does.
    for target, source in zip(targets, sources, strict=True):
        (copied,) = target.parts()
        offset = 0
        for part in source.parts():
            copy(copied[offset : offset + part.numel()], part)
            offset += part.numel()


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
            write_all(disk, path.with_suffix(".new"), signed(to_text(self._receipt, RECORD)))
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
        data = read_all(disk, path, _MOST_RECEIPT_BYTES)
        check_signature(data)
        receipt = parse(data, RECORD)
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
                together(save.ranks, partial(self._wait, self._has_written.wait), save.doing)
                together(save.ranks, partial(self._wait, self._thread.join), save.doing)
            except BaseException:
                self._is_cancelled.set()
                self._thread.join()
                raise

    def _wait(self, until: Callable[[], object]) -> None:
        until()
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

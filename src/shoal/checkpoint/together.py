"""What ranks learn together: an error of one is raised by all, and how a background save ended."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.comm import Backend
from shoal.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    MismatchError,
)

T = TypeVar("T")


def caller(ranks: Backend | None) -> object:
    """Who saves one checkpoint at a time: a rank, or a thread that has no world."""
    return threading.current_thread() if ranks is None else ranks


def together(backend: Backend | None, action: Callable[[], T], doing: str) -> list[T]:
    """Carries out a local action on every rank and returns the results, by rank.

    The results travel as plain data. If the action fails on any rank, it counts as failed on all:
    every rank raises the error of the first that failed, itself or one that names the rank and what
    it was doing. The action may not communicate. No backend is a process of its own.
    """
    if backend is None or backend.size == 1:
        return [action()]
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as failure:
        error = failure
    answers = backend.all_gather_object([None if error is None else _told(error), result])
    failed = [rank for rank, (trouble, _) in enumerate(answers) if trouble is not None]
    if failed:
        if error is not None and failed[0] == backend.rank:
            raise error
        raise _retold(failed[0], answers[failed[0]][0], doing) from error
    return [value for _, value in answers]


def check_same(call: str, arguments: Sequence[Mapping[str, Any]]) -> None:
    """Refuses arguments that differ between ranks; all ranks see all, and raise the same."""
    for rank, given in enumerate(arguments):
        for name, value in given.items():
            if value != arguments[0][name]:
                raise MismatchError(
                    f"{call} must get the same arguments on all ranks, but {name} is "
                    f"{arguments[0][name]!r} on rank 0 and {value!r} on rank {rank}; nothing was "
                    "saved"
                )


def _told(error: Exception) -> list[Any]:
    about = None
    if isinstance(error, CorruptCheckpointError):
        about = [error.file, error.reason, error.tensor]
    return [type(error).__name__, str(error), about]


def _retold(rank: int, told: list[Any], doing: str) -> CheckpointError:
    kind, text, about = told
    if about is not None:
        return CorruptCheckpointError(about[0], f"{about[1]} (found by rank {rank})", about[2])
    if kind == CheckpointMismatchError.__name__:
        return CheckpointMismatchError(text)
    return CheckpointError(f"{doing} failed on rank {rank}: {kind}: {text}")


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
        return f"<PendingSave {self.path}{'' if self.is_agreed else ', not agreed on yet'}>"


_pending: weakref.WeakKeyDictionary[object, PendingSave] = weakref.WeakKeyDictionary()


def note_pending(ranks: Backend | None, save: PendingSave) -> PendingSave:
    """The next `finish_pending` of these ranks waits for it."""
    _pending[caller(ranks)] = save
    return save


def finish_pending(ranks: Backend | None) -> None:
    """Waits for the save that goes on in the background, if there is one; all ranks call it."""
    pending = _pending.pop(caller(ranks), None)
    if pending is not None:
        pending.wait()

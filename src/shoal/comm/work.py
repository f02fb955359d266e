"""Operations under way: the handle a caller gets, and the thread that carries them out."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from shoal.errors import ClosedError
from shoal.system.deadline import under_way_error

T = TypeVar("T")


class Work(ABC, Generic[T]):
    """An operation that goes on while the caller computes.

    Example:
        >>> def overlap(world, gradients):
        ...     work = world.backend.all_reduce(gradients, async_op=True)
        ...     other_things()
        ...     return work.wait()
    """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> T:
        """Returns the result once it is there.

        Args:
            timeout: Seconds to wait at most; then `DeadlineError` is raised, the operation
                goes on, and `wait` may be called again.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""


class ThreadedWork(Work[T]):
    """Work that a thread carries out."""

    def __init__(self, task: Callable[[], T], what: str) -> None:
        """``what`` names the operation in error messages."""
        self._task, self._what = task, what
        # A thread starts outside of the caller's inference mode, whose tensors it may have.
        self._is_inference = torch.is_inference_mode_enabled()
        self._done = threading.Event()
        self._process = os.getpid()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def carry_out(self) -> None:
        """Runs the task and keeps what came of it."""
        try:
            with torch.inference_mode(self._is_inference):
                self._result = self._task()
        except BaseException as error:
            self._error = error
        finally:
            del self._task
            self._done.set()

    def start_thread(self, name: str) -> None:
        """Carries the task out in a thread of its own."""
        self._thread = threading.Thread(target=self.carry_out, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the work's own thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the thread. The task itself keeps the world's deadline."""
        if self._process != os.getpid():
            raise ClosedError(f"{self._what} was begun by another process: wait for it there")
        if not self._done.wait(timeout):
            raise under_way_error(self._what, timeout)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def is_done(self) -> bool:
        """Whether the thread is through."""
        return self._done.is_set()


class WorkQueue:
    """A thread that carries out work in the order it was given, started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[ThreadedWork[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: ThreadedWork[Any] | None = None

    def is_idle(self) -> bool:
        """Whether everything given so far has been carried out."""
        return self._last is None or self._last.is_done()

    def put(self, work: ThreadedWork[T]) -> ThreadedWork[T]:
        """Queues the work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._last = work
        self._queue.put(work)
        return work

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.carry_out()

    def close(self) -> None:
        """Ends the thread once what was queued is through."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

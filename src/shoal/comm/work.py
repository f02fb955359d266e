"""Operations under way: the handle a caller gets, and the thread that carries them out."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from shoal.errors import ClosedError
from shoal.system.deadline import under_way_error

T = TypeVar("T")

_LATER_S = 0.2


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

        On a GPU that may be later: what the caller puts into its queue next comes after it.

        Args:
            timeout: Seconds to wait at most; then `DeadlineError` is raised, the operation
                goes on, and `wait` may be called again.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Whether it is over: the result is there, or an error."""

    def would_block(self) -> bool:
        """Whether `wait` would hold up this thread. On a GPU it may hold up a stream instead."""
        return not self.is_done()

    def is_done_soon(self) -> bool:
        """Whether it is over, perhaps after a moment in which a GPU may catch up."""
        return self.is_done()

    def confirm(self) -> None:
        """Waits until headers have been compared, where that comes later than the operation."""


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
        self._works: deque[ThreadedWork[Any] | None] = deque()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_last_done: threading.Event | None = None  # a work would keep its result
        self._has_later = False
        self.is_called = False
        """Whether somebody waits for what is carried out now."""

    def is_idle(self) -> bool:
        """Whether everything given so far has been carried out."""
        return self._is_last_done is None or self._is_last_done.is_set()

    def put(self, work: ThreadedWork[T]) -> ThreadedWork[T]:
        """Queues the work."""
        self._append(work)
        self.call()
        return work

    def put_later(self, work: ThreadedWork[T]) -> ThreadedWork[T]:
        """Queues work that nobody waits for yet: it has time until other work, or a call, comes.

        So the thread need not wake up, and take the interpreter from one that computes.
        """
        self._append(work)
        if not self._has_later:
            self._has_later = True
            self.call()
        return work

    def call(self) -> None:
        """Somebody waits for what was queued."""
        self._calls.put(None)

    def _append(self, work: ThreadedWork[Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._is_last_done = work._done
        self._works.append(work)

    def _run(self) -> None:
        while True:
            try:
                self._calls.get(timeout=_LATER_S if self._has_later else None)
                self.is_called = True
            except queue.Empty:
                self.is_called = False
            while self._works:
                work = self._works.popleft()
                if work is None:
                    return
                work.carry_out()
                del work  # and its result, while there is nothing to do

    def close(self) -> None:
        """Ends the thread once what was queued is through."""
        if self._thread is not None:
            self._works.append(None)
            self.call()
            self._thread.join()
            self._thread = None

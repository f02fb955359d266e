"""Several things done at once, by a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Action = Callable[[threading.Event], Any]
"""Gets an event that is set once another has failed: then the result is not wanted any more."""


class Abandoned(Exception):
    """What an action raises that was not finished because another has failed."""


def run_concurrently(actions: Sequence[Action]) -> list[Any]:
    """Does all of them, the first in this thread; returns what they return.

    Pools of threads refuse work when a process is about to end, and a save may still be going on
    then. So these are plain threads, and where none can be had, this one does it all.

    Raises:
        BaseException: What the first that failed has raised, once all have ended.

    Example:
        >>> run_concurrently([lambda has_failed: 1, lambda has_failed: 2])
        [1, 2]
    """
    work = _ConcurrentTask(actions)
    threads = [work.start(number) for number in range(1, len(actions))]
    if actions:
        work.do(0)
    for thread in threads:
        work.join(thread)
    if work.errors:
        raise work.errors[0]
    return work.results


class _ConcurrentTask:
    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._has_failed = threading.Event()
        self._surroundings = _Surroundings()
        self.results: list[Any] = [None] * len(actions)
        self.errors: list[BaseException] = []

    def do(self, number: int) -> None:
        try:
            self.results[number] = self._actions[number](self._has_failed)
        except BaseException as error:
            self._fail(error)

    def start(self, number: int) -> threading.Thread | None:
        """The thread; None if no thread could be started and this one has done the work."""
        thread = threading.Thread(target=self._do_aside, args=(number,), daemon=True)
        thread.name = "shoal-side"
        try:
            thread.start()
        except RuntimeError:
            self.do(number)
            return None
        return thread

    def join(self, thread: threading.Thread | None) -> None:
        while thread is not None and thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # Ctrl-C: it ends soon, and must have ended
                self._fail(error)

    def _do_aside(self, number: int) -> None:
        with self._surroundings.entered():
            self.do(number)

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self._has_failed.set()


class _Surroundings:
    """What torch keeps for each thread: its modes, and the streams that GPUs work on."""

    def __init__(self) -> None:
        self._is_inference = torch.is_inference_mode_enabled()
        self._has_grad = torch.is_grad_enabled()
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        self._streams = [torch.cuda.current_stream(device) for device in range(count)]
        self._device = torch.cuda.current_device() if count else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In a thread that ends afterwards: streams are not set back."""
        for stream in self._streams:
            torch.cuda.set_stream(stream)
        if self._device is not None:
            torch.cuda.set_device(self._device)
        with torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._has_grad):
            yield

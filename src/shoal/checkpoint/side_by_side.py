"""Several things done at once, by a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def side_by_side(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Does all of them, the first in this thread; returns what they return.

    Pools of threads refuse work when a process is about to end, and a save may still be going on
    then. So these are plain threads.

    Raises:
        BaseException: What the first of those that failed has raised, once all have ended.

    Example:
        >>> side_by_side([lambda: 1, lambda: 2])
        [1, 2]
    """
    results: list[Any] = [None] * len(actions)
    errors: list[BaseException | None] = [None] * len(actions)

    def work(number: int) -> None:
        try:
            results[number] = actions[number]()
        except BaseException as error:
            errors[number] = error

    threads = []
    for number in range(1, len(actions)):
        thread = threading.Thread(target=work, args=(number,), name="shoal-side", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are no more threads to be had
            work(number)
        else:
            threads.append(thread)
    if actions:
        work(0)
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results

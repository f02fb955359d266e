"""Records which functions of shoal are called, in order, with a profiler's hook."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

Call = tuple[str, str]  # a file below the package, a function in it

# A round of a loop may be this many calls long, to be taken for a repetition of the one before.
LONGEST_ROUND = 24
COMPREHENSIONS = frozenset({"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"})


class Recorder:
    """The calls of this thread and of threads that start while it records.

    Loops leave one round: a wait that polls would otherwise count as often as it looked. Calls
    made by an import, and bodies of classes, count as nothing.
    """

    def __init__(self, package: str) -> None:
        self._package = os.path.join(package, "")
        self._calls: dict[int, list[Call]] = defaultdict(list)
        self._num_imports: dict[int, int] = defaultdict(int)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts, calls are recorded."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def walk(self) -> dict[str, Any]:
        """How many files, functions, hops and changes of folder there were, and which."""
        calls = [call for thread in self._calls.values() for call in thread]
        files = [[file for file, _ in thread] for thread in self._calls.values()]
        folders = [[os.path.dirname(file) for file in thread] for thread in files]
        return {
            "files": len({file for file, _ in calls}),
            "functions": len(set(calls)),
            "hops": sum(map(num_changes, files)),
            "changes of folder": sum(map(num_changes, folders)),
            "called": {
                file: list(dict.fromkeys(name for path, name in calls if path == file))
                for file in dict.fromkeys(file for file, _ in calls)
            },
        }

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        thread = threading.get_ident()
        if code.co_name == "<module>":
            self._num_imports[thread] += 1 if event == "call" else -1
        elif event == "call" and code.co_filename.startswith(self._package):
            is_function = code.co_flags & inspect.CO_OPTIMIZED
            if is_function and code.co_name not in COMPREHENSIONS and not self._num_imports[thread]:
                file = code.co_filename.removeprefix(self._package)
                append(self._calls[thread], (file, code.co_qualname))


def append(calls: list[Call], call: Call) -> None:
    """Appends a call, and takes away what then repeats what is just before it."""
    calls.append(call)
    for length in range(1, min(LONGEST_ROUND, len(calls) // 2) + 1):
        if calls[-1] == calls[-1 - length] and calls[-length:] == calls[-2 * length : -length]:
            del calls[-length:]
            return


def num_changes(names: list[str]) -> int:
    return sum(before != after for before, after in pairwise(names))

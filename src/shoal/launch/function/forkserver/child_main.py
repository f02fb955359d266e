"""What a forked child does: make itself look freshly started, call its entry point, exit.

It never returns into the server's code, and never touches the server's random state, signal
handlers or standard streams. Of the caller's streams the descriptors travel, not Python's objects:
so a child writes to wherever the caller's 0, 1 and 2 lead at the time of the call.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import random
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import NoReturn

from shoal.launch.function.forkserver.request import Descriptors, Request
from shoal.launch.rank_settings import threads_of
from shoal.system.libc import die_with_parent
from shoal.system.memory_file import MemoryFile

Entry = Callable[[socket.socket, bytes], int | None]


def run(descriptors: Descriptors, server: int) -> NoReturn:
    """Runs a whole child, from just after the fork to its exit."""
    code = 1
    try:
        code = _call_entry(descriptors, server)
    except SystemExit as error:
        code = _code_of(error)
    except BaseException:
        traceback.print_exc()
    finally:
        _exit(code)


def _call_entry(descriptors: Descriptors, server: int) -> int:
    die_with_parent(server)
    _adopt_streams(descriptors.stdin, descriptors.stdout, descriptors.stderr)
    _reset_signals()
    request = Request.decode(_read_and_close(descriptors.request))
    _take_context(request, descriptors.cwd)
    _seed()
    _set_num_threads()
    gc.enable()
    channel = socket.socket(fileno=descriptors.channel)
    payload = _read_and_close(descriptors.payload)
    return resolve(request.entry)(channel, payload) or 0


def _reset_signals() -> None:
    """Undoes what the server set: Ctrl-C interrupts again, all others do their default."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_context(request: Request, cwd: int) -> None:
    os.environ.clear()
    os.environ.update(request.env)
    os.fchdir(cwd)
    os.close(cwd)
    sys.path[:] = request.path
    sys.argv[:] = request.argv
    importlib.invalidate_caches()
    # Nothing of the server's own start should be found in the module that users call theirs.
    sys.modules["__main__"] = types.ModuleType("__main__")
    _follow_environment()


def _seed() -> None:
    """Seeds Python's and numpy's global generators as a fresh interpreter would.

    Without this all children would draw the same numbers. Torch's default generator starts from
    one fixed seed in every fresh process, and the server never draws from it.
    """
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _set_num_threads() -> None:
    """Honours OMP_NUM_THREADS, which torch read long before this child had its environment."""
    count = threads_of(os.environ)
    if count is not None:
        import torch

        torch.set_num_threads(count)


def resolve(entry: str) -> Entry:
    """The function that `module:function` names."""
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


def _read_and_close(fd: int) -> bytes:
    try:
        return MemoryFile.read(fd)
    finally:
        os.close(fd)


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _exit(code: int) -> NoReturn:
    """Ends the process without unwinding into the server's frames.

    The exit functions run first: they stop what the entry point started (worker processes of data
    loaders, a forkserver of its own) and users' libraries save their last state there.
    """
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    flush()
    os._exit(code & 0xFF)


def flush() -> None:
    """Writes out what this process printed so far, before another one writes or this one ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # streams may be None, closed or replaced
            stream.flush()


def _adopt_streams(stdin: int, stdout: int, stderr: int) -> None:
    """Makes the descriptors this process's 0, 1 and 2, with streams that fit what they are."""
    for target, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, target)
        os.close(fd)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors or "strict"
    reader = open(0, encoding=encoding, closefd=False)  # noqa: SIM115 (stays open)
    sys.stdin = sys.__stdin__ = reader  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _writer(1, encoding, errors)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, encoding, "backslashreplace")  # type: ignore[misc]


def _follow_environment() -> None:
    """Honours PYTHONUNBUFFERED, once the environment is the caller's."""
    if os.environ.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=True)


def _writer(fd: int, encoding: str, errors: str) -> io.TextIOWrapper:
    """A text stream that is buffered as a fresh interpreter would buffer it."""
    by_line = fd == 2 or os.isatty(fd)
    return open(
        fd, "w", buffering=1 if by_line else -1, encoding=encoding, errors=errors, closefd=False
    )

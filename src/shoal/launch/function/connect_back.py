"""Runs one function on ranks that another command starts, such as `mpiexec`.

The command starts a small program per rank. It connects to a socket of the caller, says its rank,
gets the call and reports over the same connection. `run_command` is the caller's side, `main` the
rank's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.function.call import WORKER, encode_call
from shoal.launch.function.collector import Collector
from shoal.launch.function.forkserver.child_main import resolve
from shoal.launch.function.forkserver.forkserver import Child, fork_server
from shoal.launch.function.forkserver.request import Request
from shoal.launch.function.listener import HELLO, RankListener
from shoal.launch.function.outcome import Outcome
from shoal.launch.joining.environment import discover
from shoal.system.libc import die_with_parent
from shoal.system.memory_file import MemoryFile

_STOP_SECONDS = 3.0
_KEPT_BYTES = 4096
_PIECE_BYTES = 1 << 16
_SOURCE = str(Path(__file__).resolve().parents[3])
_BOOTSTRAP = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from shoal.launch.function.connect_back import main; sys.exit(main())"
)


def run_command(
    command: list[str],
    env: Mapping[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    grace: float = 10.0,
    *,
    entry: str = WORKER,
    connect_timeout: float = 120.0,
) -> list[Outcome]:
    """Runs `fn(*args)` on ranks that `command` starts; their outcomes in order of rank.

    A rank that ended without a report has the end of the command's standard error for a traceback.

    The program that each rank runs is appended to the command, as in `["mpiexec", "-n", "4"]`. Else
    as `run_processes`.

    Raises:
        LaunchError: The command did not start all ranks, and none of them said why.
    """
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(Collector(ranks, grace))
        stderr = stack.enter_context(contextlib.closing(CapturedStderr()))
        request = Request.of_caller(entry, {})
        listener = RankListener(collector, ranks, request, encode_call(fn, args))
        stack.callback(listener.close)
        # It can be imported wherever this process found it.
        program = [sys.executable, "-c", _BOOTSTRAP, _SOURCE, listener.path]
        launcher = stack.enter_context(_start([*command, *program], env, stderr))
        stack.callback(_stop, launcher)
        _watch_command(collector, launcher, stderr)
        complaint = _await_ranks(collector, launcher, command, connect_timeout)
        outcomes = collector.run()
        _await_end(collector, launcher, grace)
        stderr.drain()
        return _complete(outcomes, ranks, stderr, complaint)


def _start(command: list[str], env: Mapping[str, str], stderr: CapturedStderr) -> Child:
    """Starts the command as a child of the forkserver, so that it never outlives the caller."""
    payload = json.dumps(command).encode()
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # it would eat the caller's input
    try:
        return fork_server().spawn(
            f"{__name__}:execute", payload, env, streams=(stdin, 1, stderr.write_end)
        )
    finally:
        os.close(stdin)
        stderr.hand_over()


def execute(channel: socket.socket, payload: bytes) -> int:
    """Becomes the command; runs in the forkserver's child and returns only if that fails."""
    command = json.loads(payload)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
    return 127


def _watch_command(collector: Collector, launcher: Child, stderr: CapturedStderr) -> None:
    """Has the collector's loop pass on standard error and see the command's end."""

    def pass_on() -> None:
        if not stderr.copy():
            collector.unwatch(stderr.fileno())

    def end() -> None:
        launcher.wait(0.0)
        collector.unwatch(launcher)
        collector.expect_end()

    collector.watch(stderr.fileno(), pass_on)
    collector.watch(launcher, end)


def _await_ranks(
    collector: Collector, launcher: Child, command: list[str], connect_timeout: float
) -> str:
    """Waits for all ranks to come; what the command did instead, if they do not."""
    limit = time.monotonic() + connect_timeout
    while not collector.complete and launcher.exit_code is None and time.monotonic() < limit:
        collector.step(limit)
    if collector.complete:
        return ""
    collector.expect_end()
    if launcher.exit_code is not None:
        return f"`{shlex.join(command)}` ended with exit code {launcher.exit_code}"
    _stop(launcher)
    return f"`{shlex.join(command)}` did not start the others within {connect_timeout:g} s"


def _await_end(collector: Collector, launcher: Child, grace: float) -> None:
    """Gives the command time to notice that its ranks are gone."""
    limit = time.monotonic() + grace
    while launcher.exit_code is None and time.monotonic() < limit:
        collector.step(limit)


def _stop(launcher: Child) -> None:
    launcher.kill(signal.SIGTERM)
    if launcher.wait(_STOP_SECONDS) is None:
        launcher.kill()
        launcher.wait(_STOP_SECONDS)


def _complete(
    outcomes: list[Outcome], ranks: int, stderr: CapturedStderr, complaint: str
) -> list[Outcome]:
    """Adds an outcome for each rank that never came, or raises if no rank has said why."""
    found = {outcome.rank: outcome for outcome in outcomes}
    if len(found) < ranks and not any(outcome.error for outcome in outcomes):
        raise LaunchError(
            f"{len(found)} of {ranks} ranks connected: {complaint}. "
            f"The end of its standard error:\n{stderr.text or '(nothing)'}"
        )
    for rank in set(range(ranks)) - set(found):
        found[rank] = Outcome(rank, failed_at=time.monotonic())
    for outcome in found.values():
        if outcome.failed and outcome.error is None:
            outcome.traceback = stderr.text
    return [found[rank] for rank in range(ranks)]


def main() -> int:
    """The program of each rank: connects to the caller, and does what it is told."""
    die_with_parent(os.getppid())
    info = discover()
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    channel.sendall(HELLO.pack(info.rank, info.size))
    _, fds, _, _ = socket.recv_fds(channel, 1, 2, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != 2:
        print("the caller ended before it said what to run", file=sys.stderr)
        return 1
    encoded, payload = (MemoryFile.read(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    request = Request.decode(encoded)
    sys.path[:], sys.argv[:] = request.path, request.argv
    return resolve(request.entry)(channel, payload) or 0


class CapturedStderr:
    """A pipe whose write end a command gets as its standard error."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = b""

    @property
    def text(self) -> str:
        """The last lines that came."""
        return self._kept.decode(errors="replace").strip()

    def fileno(self) -> int:
        """The end to watch: readable when there is something to pass on."""
        return self._read_end

    def hand_over(self) -> None:
        """Closes the write end here, once the command has it, so that its end can be seen."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def copy(self) -> bool:
        """Passes on one piece; False when no more will come."""
        piece = os.read(self._read_end, _PIECE_BYTES)
        self._kept = (self._kept + piece)[-_KEPT_BYTES:]
        with contextlib.suppress(OSError):  # a closed standard error is no reason to fail
            os.write(2, piece)
        return bool(piece)

    def drain(self) -> None:
        """Passes on all that is there now."""
        with contextlib.suppress(BlockingIOError):
            while self.copy():
                pass

    def close(self) -> None:
        """Gives both ends back."""
        self.hand_over()
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1

"""A rank as the launcher sees it: a process group that will end, and what it said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.script.guard import spawn
from shoal.launch.script.output import RankOutput
from shoal.system.limits import advice

_SWEEP_SECONDS = 5.0
_POLL_SECONDS = 0.02


class Rank:
    """One started rank; `ended` becomes its return code, negative for a signal as in subprocess.

    Each rank leads a process group of its own, so that what it started can be ended with it.
    """

    def __init__(self, number: int, pid: int, output: RankOutput) -> None:
        self.number = number
        self.pid = pid
        self.output = output
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended_at = 0.0
        self.fate = ""
        """Why the launcher ended it, if it did."""
        self._watch: asyncio.Task[None] | None = None  # the loop itself keeps no hold of a task

    @property
    def is_running(self) -> bool:
        """Whether the rank has not ended yet."""
        return not self.ended.done()

    def follow(self, code: Coroutine[Any, Any, int]) -> None:
        """Learns of the end from a coroutine that waits for it."""

        async def watch() -> None:
            self.end(await code)

        self._watch = asyncio.create_task(watch())

    def end(self, code: int) -> None:
        """Notes that the process has ended."""
        if self.is_running:
            self.ended_at = time.time()
            self.ended.set_result(code)

    def send(self, signum: int) -> None:
        """Signals the rank alone: what it started may not know the signal, and die of it."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def send_group(self, signum: int) -> None:
        """Signals the rank and all that it started."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def end_group(self, signum: int, fate: str) -> None:
        """Signals the group as `send_group` does, and remembers why."""
        if self.is_running:
            self.fate = self.fate or fate
            self.send_group(signum)

    async def sweep(self) -> None:
        """Waits for the end of the rank, then ends what it left behind in its group."""
        await asyncio.wait([self.ended])
        deadline = time.monotonic() + _SWEEP_SECONDS
        if _signal_group(self.pid, signal.SIGTERM):
            while _signal_group(self.pid, 0) and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
            _signal_group(self.pid, signal.SIGKILL)
        self.output.close()


def start_rank(
    number: int,
    command: Sequence[str],
    env: Mapping[str, str],
    output: RankOutput,
    stdin: int | None,
) -> Rank:
    """Starts a rank as a child of this process; its end is noticed as it happens."""
    out, err = output.fds
    try:
        process = spawn(command, stdin=stdin, stdout=out, stderr=err, env=env)
    except OSError as error:
        output.started()
        output.close()
        raise LaunchError(
            f"Rank {number} must start, but the system refused: {error}. "
            + (
                advice(error)
                or f"Check that {command[0]} runs, that the arguments are not too long, and "
                "`ulimit -u`."
            )
        ) from error
    output.started()
    rank = Rank(number, process.pid, output)
    rank.follow(exit_of(process))
    return rank


async def exit_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a child without a thread: through a pidfd, or by asking now and then."""
    if process.poll() is None and hasattr(os, "pidfd_open"):
        await _readable(os.pidfd_open(process.pid))
    while process.poll() is None:
        await asyncio.sleep(_POLL_SECONDS)
    return process.wait()


async def _readable(fd: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _signal_group(group: int, signum: int) -> bool:
    """Whether there was anyone alive in the group to signal."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass  # an orphan that we adopted, dead already
    try:
        os.killpg(group, signum)
    except OSError:
        return False
    return True

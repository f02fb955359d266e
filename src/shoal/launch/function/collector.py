"""Waits for ranks, however they were started: takes in their results and watches their ends.

All in one thread and one selector, so that a large result of one rank never holds up another and
nothing has to be joined afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeAlias

from shoal.launch.function.outcome import ERROR, FrameReader, Outcome, decode_frame
from shoal.system.stopped import StoppedProcesses

if TYPE_CHECKING:
    from shoal.launch.function.forkserver.forkserver import Child
    from shoal.launch.function.listener import ConnectedProcess

    Process: TypeAlias = "Child | ConnectedProcess"

# How long the kernel gets to end a killed process before it is given up as unkillable.
_REAP_SECONDS = 10.0
_LOOK_SECONDS = 0.25


@dataclass(eq=False)
class _Member:
    rank: int
    channel: socket.socket
    process: Process
    reader: FrameReader = field(default_factory=FrameReader)
    ended: bool = False
    exit_code: int | None = None
    failed_at: float | None = None
    fate: str = ""
    is_echo: bool = False

    def outcome(self) -> Outcome:
        """What the rank said, or the little there is to say of a silent one."""
        if self.reader.frame is None:
            outcome = Outcome(self.rank, exit_code=self.exit_code, failed_at=self.failed_at)
            outcome.fate, outcome.is_echo = self.fate, self.is_echo
            outcome.error = self.process.lost()
            return outcome
        outcome = decode_frame(self.rank, self.reader.frame)
        outcome.exit_code = self.exit_code
        outcome.used_compiler = self.reader.frame.used_compiler
        return outcome


class Collector:
    """Gathers one outcome from each rank that was added, and leaves nothing running.

    After the first failure, and after the last result, ranks get `grace` seconds to end; then
    they are killed. One that is stopped (SIGSTOP) could not use them, and is killed at once.

    Example:
        >>> with Collector(ranks=2, grace=10.0) as collector:
        ...     for rank, child in enumerate(children):
        ...         collector.add(rank, child.channel, child)
        ...     outcomes = collector.run()
    """

    def __init__(
        self, ranks: int, grace: float, on_exit: Callable[[int, int], None] | None = None
    ) -> None:
        """Expects `ranks` members; `on_exit(rank, code)` is called when one's end is seen."""
        self._ranks = ranks
        self._grace = grace
        self._on_exit = on_exit
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _Member] = {}
        self._deadline: float | None = None
        self._killed = False
        self._stopped = StoppedProcesses()

    @property
    def complete(self) -> bool:
        """Whether all expected ranks have been added."""
        return len(self._members) == self._ranks

    def add(self, rank: int, channel: socket.socket, process: Process) -> None:
        """Takes over a started rank; both handles are closed by the collector."""
        channel.setblocking(False)
        member = self._members[rank] = _Member(rank, channel, process)
        self.watch(channel, functools.partial(self._read, member))
        self.watch(process, functools.partial(self._end, member))

    def watch(self, source: Process | socket.socket | int, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def unwatch(self, source: Process | socket.socket | int) -> None:
        """Stops watching, if it was watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def run(self) -> list[Outcome]:
        """Waits until every added rank has ended; their outcomes in order of rank."""
        while not all(member.ended for member in self._members.values()):
            self.step()
        return [self._members[rank].outcome() for rank in sorted(self._members)]

    def step(self, until: float | None = None) -> None:
        """Handles what is there next, waiting for it no longer than `until` or the deadline."""
        limits = [limit for limit in (until, self._deadline) if limit is not None]
        if self._deadline is not None:
            limits.append(time.monotonic() + _LOOK_SECONDS)
        timeout = max(0.0, min(limits) - time.monotonic()) if limits else None
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._deadline is not None:
            self._kill_stopped()
            if time.monotonic() >= self._deadline:
                self._give_up()

    def expect_end(self) -> None:
        """Starts the clock: ranks still running after the grace are killed."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace

    def close(self) -> None:
        """Kills and reaps what still runs, and gives every descriptor back."""
        running = self._running()
        for member in running:
            member.process.kill()
        limit = time.monotonic() + _REAP_SECONDS
        for member in running:
            member.process.wait(max(0.0, limit - time.monotonic()))
        for member in self._members.values():
            member.channel.close()
            member.process.close()
        self._selector.close()

    def _read(self, member: _Member) -> None:
        if member.ended:  # its end was seen in the same round
            return
        with contextlib.suppress(BlockingIOError):
            if not member.reader.advance(member.channel):
                self._fail(member)  # it can no longer say anything
                self.unwatch(member.channel)
        if member.reader.frame is not None:
            self._heard(member)

    def _heard(self, member: _Member) -> None:
        self.unwatch(member.channel)
        if member.reader.frame is not None and member.reader.frame.kind == ERROR:
            self.expect_end()
        members = self._members.values()
        if self.complete and all(each.ended or each.reader.frame for each in members):
            self.expect_end()

    def _end(self, member: _Member) -> None:
        """Notes that a rank's process is gone, after reading its last words."""
        self.unwatch(member.process)
        member.exit_code = member.process.wait(0.0)
        with contextlib.suppress(BlockingIOError):  # a process it left behind holds the channel
            while member.reader.frame is None and member.reader.advance(member.channel):
                pass
        member.ended = True
        if member.reader.frame is None:
            self._fail(member)
        self._heard(member)
        if self._on_exit is not None and member.exit_code is not None:
            self._on_exit(member.rank, member.exit_code)

    def _fail(self, member: _Member) -> None:
        """Notes the first sign of a rank that will give no result."""
        if member.failed_at is None:
            member.failed_at = time.monotonic()
        self.expect_end()

    def _kill_stopped(self) -> None:
        running = {member.process.pid: member for member in self._running()}
        for pid in self._stopped.among(running):
            running[
                pid
            ].fate = f"its process (pid {pid}) was stopped (SIGSTOP), and killed for that"
            running[pid].process.kill()

    def _running(self) -> list[_Member]:
        return [member for member in self._members.values() if not member.ended]

    def _give_up(self) -> None:
        """Kills what runs on past the deadline; what survives even that is let go."""
        for member in self._members.values():
            if not member.ended and self._killed:
                member.ended = True
                member.failed_at = member.failed_at or time.monotonic()
            elif not member.ended:
                if not member.fate:
                    member.fate = f"its process ran on for {self._grace:g} s, and was killed"
                    member.is_echo = member.failed_at is None
                member.process.kill()
        self._killed = True
        self._deadline = time.monotonic() + _REAP_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

"""Runs one function on processes that come and go: one that dies does not end the others.

The caller holds the roster: it starts the processes, sees them end, kills one that is stopped, and
starts others in the place of those that died.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.function.call import WORKER as ENTRY
from shoal.launch.function.call import encode_call, will_use_compiler
from shoal.launch.function.collector import Collector
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.outcome import Outcome
from shoal.launch.joining.process_membership import PERSON_VARIABLE
from shoal.meeting.address import MEETING_VARIABLE, free_port
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import SPARE, WORKER, Roster
from shoal.meeting.server import MeetingServer
from shoal.system.memory_file import MemoryFile
from shoal.system.stopped import StoppedProcesses

_GRACE_S = 10.0
_LOOK_EVERY_S = 0.25
_BEAT_S = 2.0


def run_elastic_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    settings: dict[str, str],
    bounds: Elastic,
) -> list[Outcome]:
    """The outcomes of those who are members at the end, by rank; a failure if too few are left."""
    call = encode_call(fn, args)
    if will_use_compiler(call):
        fork_server().load_compiler()
    with (
        MeetingServer.on_one_host() as server,
        MemoryFile(call) as payload,
        _Processes(server, payload, ranks, settings, bounds) as processes,
    ):
        return processes.run()


class _Processes(Collector):
    """The processes of one run, by the numbers that the roster gives them."""

    def __init__(
        self,
        server: MeetingServer,
        payload: MemoryFile,
        ranks: int,
        settings: dict[str, str],
        bounds: Elastic,
    ) -> None:
        super().__init__(ranks, _GRACE_S)
        self._roster = Roster(ranks, bounds)
        self._desk = server.hold(self._roster)
        self._payload, self._bounds = payload, bounds
        self._restarts = bounds.restarts
        self._fenced = StoppedProcesses(_BEAT_S)
        self._is_over = False
        host, port = free_port()
        self._settings = {
            **settings,
            "SHOAL_LAUNCHED": "1",
            "GROUP_RANK": "0",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            MEETING_VARIABLE: server.address,
        }
        # All are expected before the first one is there.
        roles = [WORKER] * ranks + [SPARE] * bounds.spares
        for number in [self._desk.expect(role) for role in roles]:
            first = (number, ranks) if number < ranks else (0, 1)
            self._start(number, *first)

    def run(self) -> list[Outcome]:
        """Sees all processes through to their end."""
        while any(not member.ended for member in self._members.values()):
            self.step(time.monotonic() + _LOOK_EVERY_S)
            self._kill_fenced()
            if not self._is_over and not self._is_going_on():
                self._end_run()
        return self._outcomes()

    def expect_end(self) -> None:
        """The end of one is not the end of all."""
        if self._is_over:
            super().expect_end()

    def _start(self, number: int, rank: int, size: int) -> None:
        env = {
            **os.environ,
            **self._settings,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            PERSON_VARIABLE: str(number),
        }
        child = fork_server().spawn(ENTRY, self._payload, env)
        self.add(number, child.channel, child)
        self._on_exit = self._hear_of_end

    def _hear_of_end(self, number: int, code: int) -> None:
        person = self._roster.persons[number]
        if not person.is_alive:  # it said goodbye
            return
        if self._restarts > 0 and not self._is_over and not self._has_result():
            self._restarts -= 1
            another = self._desk.expect(WORKER)
            self._start(another, 0, 1)
        member = self._members[number]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        outcome = member.outcome()
        why = member.fate or f"its process {how}"
        if outcome.error is not None:
            why = f"{type(outcome.error).__name__}: {outcome.error}".partition("\n")[0]
        self._desk.end(number, why)

    def _has_result(self) -> bool:
        return any(each.ended and each.exit_code == 0 for each in self._members.values())

    def _kill_fenced(self) -> None:
        """One that is stopped is gone for the others, and must not wake up among them."""
        running = {member.process.pid: member for member in self._running()}
        for pid in self._fenced.among(running):
            running[
                pid
            ].fate = f"its process (pid {pid}) was stopped (SIGSTOP), and killed for that"
            running[pid].process.kill()

    def _is_going_on(self) -> bool:
        """Whether somebody trains, or will."""
        if self._roster.refusal:
            return False
        living = [self._roster.persons[member.rank] for member in self._running()]
        if not self._roster.worlds:
            return bool(living)
        is_member = any(each.rank is not None and each.is_alive for each in living)
        return is_member or (not self._has_result() and bool(living))

    def _end_run(self) -> None:
        """Members that were told so end by themselves; those who wait in vain are not needed."""
        self._is_over = True
        for member in self._running():
            if self._roster.persons[member.rank].rank is None:
                member.process.kill()
        self.expect_end()

    def _outcomes(self) -> list[Outcome]:
        last = self._roster.worlds[-1].members if self._roster.worlds else ()
        found: list[Outcome] = []
        for rank, number in enumerate(last):
            outcome = self._members[number].outcome()
            outcome.rank = rank
            if not outcome.failed:
                found.append(outcome)
        if len(found) >= self._bounds.min_ranks:
            return found
        return self._failures()

    def _failures(self) -> list[Outcome]:
        """Those of their own, the last one first: it is what the run could not go on after."""
        failures = []
        for number, member in self._members.items():
            outcome = member.outcome()
            person = self._roster.persons[number]
            outcome.rank = number if person.rank is None else person.rank
            is_told = isinstance(outcome.error, LaunchError) and bool(self._roster.refusal)
            if outcome.failed and (person.rank is not None or outcome.error is not None):
                outcome.is_echo = outcome.is_echo or is_told
                failures.append(outcome)
        own = [each for each in failures if not each.is_echo]
        with contextlib.suppress(ValueError):
            last = max(own, key=lambda each: each.failed_at or 0.0)
            return [last]
        return failures or [
            Outcome(0, error=LaunchError(self._roster.refusal or "no rank came"), failed_at=0.0)
        ]

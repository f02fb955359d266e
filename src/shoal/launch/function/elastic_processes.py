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
from shoal.launch.elastic.crew import Crew, Fence, worker_variables
from shoal.launch.function.call import WORKER as ENTRY
from shoal.launch.function.call import encode_call, will_use_compiler
from shoal.launch.function.collector import Collector
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.outcome import Outcome
from shoal.meeting.address import MEETING_VARIABLE, free_port
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.server import MeetingServer
from shoal.system.memory_file import MemoryFile

_GRACE_S = 10.0
_LOOK_EVERY_S = 0.25


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
        super().__init__(ranks, _GRACE_S, self._hear_of_end)
        self._crew = Crew(server, ranks, bounds, self._start)
        self._roster, self._fence = self._crew.roster, Fence()
        self._payload, self._bounds = payload, bounds
        host, port = free_port()
        self._settings = {
            **settings,
            "SHOAL_LAUNCHED": "1",
            "GROUP_RANK": "0",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            MEETING_VARIABLE: server.address,
        }
        self._crew.begin()

    def run(self) -> list[Outcome]:
        """Sees all processes through to their end."""
        while any(not member.ended for member in self._members.values()):
            self.step(time.monotonic() + _LOOK_EVERY_S)
            self._kill_fenced()
            if not self._crew.is_over and not self._crew.is_going_on:
                self._end_run()
        return self._outcomes()

    def expect_end(self) -> None:
        """The end of one is not the end of all."""
        if self._crew.is_over:
            super().expect_end()

    def _start(self, number: int, rank: int, size: int) -> None:
        env = {**os.environ, **self._settings, **worker_variables(number, rank, size)}
        child = fork_server().spawn(ENTRY, self._payload, env)
        self.add(number, child.channel, child)

    def _hear_of_end(self, number: int, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        member = self._members[number]
        error = member.outcome().error if code else None
        why = member.fate or f"its process {how}"
        if error is not None:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._crew.note_end(number, code, why)

    def _kill_fenced(self) -> None:
        pids = {member.rank: member.process.pid for member in self._running()}
        for number in self._fence.beyond(pids):
            member = self._members[number]
            pid = pids[number]
            member.fate = f"its process (pid {pid}) was stopped (SIGSTOP), and killed for that"
            member.process.kill()

    def _end_run(self) -> None:
        """Members that were told so end by themselves; those who wait in vain are killed."""
        for number in self._crew.end():
            if not self._members[number].ended:
                self._members[number].process.kill()
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
            is_told = bool(self._roster.refusal) and (
                person.rank is None or isinstance(outcome.error, LaunchError)
            )
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

"""The ranks of a script on this node, from their start to their end.

The life of a launch: the place where ranks meet is open, ranks start. Then nothing
happens here until all ranks have ended, or one failed, or someone asked to stop. In the last two
cases the others have a grace period (shoal wakes them by itself), then SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.launch.joining.presence import has_mark
from shoal.launch.mpi.job import MpiJob
from shoal.launch.script.config import LaunchConfig, common_variables, own_variables
from shoal.launch.script.guard import Guard
from shoal.launch.script.held import LONGEST_SECONDS, MOMENT_SECONDS
from shoal.launch.script.meeting_place import MeetingPlace
from shoal.launch.script.output import FileOutput, RankOutput, ScreenOutput, console
from shoal.launch.script.rank import Rank, start_rank
from shoal.launch.script.summary import (
    STOPPED,
    Ending,
    exit_code,
    first_failure,
    is_interrupt,
    read_record,
    record_path,
    summarize,
)
from shoal.system.stopped import StoppedProcesses

_TERM_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_OTHER_NODES_SECONDS = 300.0
_MET_SECONDS = 2.0


class NodeLaunch:
    """One launch: its ranks, and what they share."""

    noun = "rank"
    """What those are called that it has started, and numbered."""

    def __init__(
        self, config: LaunchConfig, folder: Path, guard: Guard, place: MeetingPlace
    ) -> None:
        self._config, self._place = config, place
        self._folder = folder
        self._guard = guard
        self._ranks: list[Rank] = []
        self._numbers: list[int] = []
        self._is_ending = False
        self._signals = Signals(self._ranks)
        self._job = MpiJob(config, folder) if config.backend == "mpi" else None
        self._out, self._err = console(sys.stdout, sys.stderr)

    async def run(self) -> int:
        """Returns the exit code, when all ranks have ended."""
        signals = self._signals
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(signals.forwarded())
            stack.push_async_callback(self._clean_up)
            await self._start()
            await self._see_through(signals)
            code = self._report(signals)
            await self._wait_for_nodes(signals, failed=code != 0)
        return code

    @cached_property
    def _common(self) -> dict[str, str]:
        """What all ranks start with."""
        place = self._place
        master = (place.master_host, place.master_port)
        common = common_variables(self._config, master, place.address, self._folder)
        return {**os.environ, **common}

    async def _start(self) -> None:
        config = self._config
        if config.log_dir is not None:
            self._err.say(
                f"shoal: {config.ranks} {self.noun}(s) write to {config.log_dir}/{self.noun}-K.log"
            )
        env = self._common
        if self._job is not None:
            words = ScreenOutput("mpiexec", self._err, self._err)
            await self._job.start(env, words, self._output_of, self._add)
            return
        for local_rank in range(config.ranks):
            own = own_variables(config, local_rank)
            number = config.first_rank + local_rank
            stdin = None if number == 0 else subprocess.DEVNULL
            output = self._output_of(number)
            self._add(start_rank(number, config.command(), {**env, **own}, output, stdin))

    def _output_of(self, number: int) -> RankOutput:
        if self._config.log_dir is not None:
            return FileOutput(self._config.log_dir / f"{self.noun}-{number}.log")
        record = record_path(self._folder, number)

        def patience() -> float:
            if self._signals.stop.is_set():
                return math.inf  # what ranks say to that is no news, and they end in any case
            return LONGEST_SECONDS if self._is_ending or record.exists() else MOMENT_SECONDS

        return ScreenOutput(f"{self.noun} {number}", self._out, self._err, patience)

    def _add(self, rank: Rank) -> None:
        self._ranks.append(rank)
        self._numbers.append(rank.number)
        rank.ended.add_done_callback(lambda _: self._on_end(rank))
        self._tell_guard()

    def _on_end(self, rank: Rank) -> None:
        """A rank has ended, in whichever way."""
        self._tell_guard()
        self._place.report_failure(rank.number, rank.ended.result())

    def _tell_guard(self) -> None:
        groups = [rank.pid for rank in self._ranks if rank.is_running]
        self._guard.watch(groups if self._job is None else [*groups, self._job.pid])

    async def _see_through(self, signals: Signals) -> None:
        """Returns when no rank runs any more, however that came about."""
        await self._await_end(signals)
        self._is_ending = True
        everyone = [rank.ended for rank in self._ranks]
        grace = self._config.grace
        hearing = asyncio.create_task(self._kill_stopped())
        await first_of(_all_ended(everyone), signals.hurry.wait(), timeout=grace)
        for rank in self._ranks:
            rank.end_group(signal.SIGTERM, f"still running {grace:g} s later, and ended")
        await first_of(_all_ended(everyone), signals.hurry.wait(), timeout=_TERM_SECONDS)
        for rank in self._ranks:
            rank.send_group(signal.SIGKILL)
        await first_of(_all_ended(everyone), timeout=_TERM_SECONDS)
        hearing.cancel()
        for rank in self._ranks:
            rank.end(-signal.SIGKILL)  # the kernel has it, and may never let go

    async def _await_end(self, signals: Signals) -> None:
        """Returns when ranks may not go on much longer, or have ended."""
        everyone = [rank.ended for rank in self._ranks]
        await first_of(_all_well(everyone), signals.stop.wait())

    async def _kill_stopped(self) -> None:
        """A stopped rank hears nothing that it could use the grace for."""
        stopped = StoppedProcesses()
        while True:
            pids = stopped.among(rank.pid for rank in self._ranks if rank.is_running)
            for rank in self._ranks:
                if rank.pid in pids:
                    rank.end_group(signal.SIGKILL, STOPPED)
            await asyncio.sleep(_LOOK_SECONDS)

    def _report(self, signals: Signals) -> int:
        endings = [self._ending(rank) for rank in self._ranks]
        first = first_failure(endings)
        for held in (rank.output.held() for rank in self._ranks):
            if held is not None and (first is not None or is_interrupt(held.text())):
                held.drop()  # told below, or no news
        if signals.stopped_by is not None and (first is None or first.since >= signals.stopped_at):
            self._err.say(f"shoal: stopped by {signals.stopped_by.name}.")
            return 128 + signals.stopped_by
        if first is None:
            self._say_if_nobody_joined()
            return 0
        self._err.say(summarize(first, endings))
        return exit_code(first, endings)

    def _say_if_nobody_joined(self) -> None:
        """Several processes that never met are rarely what was wanted."""
        if len(self._numbers) > 1 and not self._has_met():
            self._err.say(
                f"shoal: the script never joined a world: each of the {len(self._numbers)} "
                "processes ran it alone. Call shoal.init() or shoal.as_distributed() in it."
            )

    def _has_met(self) -> bool:
        return any(has_mark(self._folder, number) for number in self._numbers)

    def _ending(self, rank: Rank) -> Ending:
        record = read_record(self._folder, rank.number)
        held = rank.output.held()
        if (
            held is not None
            and record is not None
            and not _are_equal(held.text(), record.traceback)
        ):
            held.release()  # there is more in it than the summary would tell
        return Ending(
            rank.number,
            rank.ended.result(),
            rank.ended_at,
            rank.output.tail(),
            record,
            rank.fate,
            "" if held is None else held.text(),
        )

    async def _wait_for_nodes(self, signals: Signals, *, failed: bool) -> None:
        """The server of several nodes must outlive the ranks of all, whose are not ours to see."""
        if self._config.nodes == 1 or signals.stop.is_set():
            return
        patience = self._patience() if failed else _OTHER_NODES_SECONDS
        await first_of(self._place.leave(), signals.stop.wait(), timeout=patience)

    def _patience(self) -> float:
        """How long the server stays after a failure: for ranks that have yet to hear of it there.

        Where a rank of ours has joined, all have met. They hear of a failure from each other, and
        other nodes may be out of reach.
        """
        if self._has_met():
            return _MET_SECONDS
        return self._config.grace + _TERM_SECONDS

    async def _clean_up(self) -> None:
        """Ends what still runs, which is nothing unless an error got us here."""
        for rank in self._ranks:
            rank.send_group(signal.SIGKILL)
        await asyncio.gather(*(rank.sweep() for rank in self._ranks))
        if self._job is not None:
            await self._job.close()


def _are_equal(shown: str, recorded: str) -> bool:
    """Whether two tracebacks say the same; Python shows blanks at the end of a line or not."""
    first, second = ([line.rstrip() for line in each.splitlines()] for each in (shown, recorded))
    return first == second


async def _all_ended(codes: list[asyncio.Future[int]]) -> None:
    await asyncio.wait(codes)


async def _all_well(codes: list[asyncio.Future[int]]) -> None:
    """Returns when all have ended, or one has ended badly."""
    for done in asyncio.as_completed(codes):
        if await done != 0:
            return


async def first_of(*waits: Coroutine[Any, Any, object], timeout: float | None = None) -> None:
    """Waits for the first of several things, and drops the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Signals:
    """Signals that reach the launcher go on to its ranks; two of them also mean the end."""

    def __init__(self, ranks: list[Rank]) -> None:
        """Forwards to `ranks`, a list that may still grow."""
        self._ranks = ranks
        self.stopped_by: signal.Signals | None = None
        self.stopped_at = 0.0
        self.stop = asyncio.Event()
        """Set by the first SIGINT or SIGTERM."""
        self.hurry = asyncio.Event()
        """Set by a second SIGINT: the grace period is skipped."""

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[None]:
        """Handles signals inside the block, and puts the handlers back that were there.

        A signal that the launcher was started to ignore (nohup) stays ignored. Outside the main
        thread Python delivers no signals, so there is nothing to forward.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {signum: signal.getsignal(signum) for signum in _FORWARDED}
        handled = [signum for signum in _FORWARDED if before[signum] not in (signal.SIG_IGN, None)]
        for signum in handled:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in handled:
                loop.remove_signal_handler(signum)
                signal.signal(signum, before[signum])

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGINT and self.stop.is_set():
            self.hurry.set()
        if signum in _STOPPING and self.stopped_by is None:
            # The time before the ranks hear of it: what they fail of is not of their own.
            self.stopped_by, self.stopped_at = signum, time.time()
            self.stop.set()
        for rank in self._ranks:
            rank.send(signum)

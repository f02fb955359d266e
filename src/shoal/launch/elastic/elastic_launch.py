"""`shoal launch --elastic`: a script on workers that come, go and die, and the roster of all.

A *worker* is a process, by a number that it keeps; its rank may be another one in the next world.
The launcher replaces workers as long as it may, and ends when nobody trains any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.elastic.account import RunAccount, change_text
from shoal.launch.elastic.crew import Crew, Fence, worker_variables
from shoal.launch.elastic.stragglers import Stragglers
from shoal.launch.script.node_launch import NodeLaunch, Signals, first_of
from shoal.launch.script.output import ScreenOutput
from shoal.launch.script.rank import Rank, start_rank
from shoal.launch.script.summary import STOPPED, Ending, is_interrupt
from shoal.meeting.roster import Announcement

_LOOK_SECONDS = 0.25
_FAREWELL_SECONDS = 5.0
# What a worker from outside is started with, to be like the others.
_SHARED = ("MASTER_ADDR", "MASTER_PORT", "SHOAL_RUN_ID", "SHOAL_BACKEND", "OMP_NUM_THREADS")


class WorkerLaunch(NodeLaunch):
    """What launches have in common whose ranks come and go."""

    noun = "worker"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fence = Fence()
        self._changed = asyncio.Event()
        self._endings: list[Ending] = []
        self._sweeps: set[asyncio.Task[None]] = set()

    def is_going_on(self) -> bool:
        """Whether there is something to wait for."""
        raise NotImplementedError

    def note_end(self, ending: Ending) -> None:
        """A worker has ended."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """What all workers start with."""
        return self._common

    def start_worker(self, number: int, rank: int = 0, size: int = 1) -> None:
        """Starts a process, whose number was given before."""
        env = {**self.variables(), **worker_variables(number, rank, size)}
        stdin = None if number == 0 else subprocess.DEVNULL
        self._add(start_rank(number, self._config.command(), env, self._output_of(number), stdin))

    async def _await_end(self, signals: Signals) -> None:
        while self.is_going_on() and not signals.stop.is_set():
            await first_of(self._changed.wait(), signals.stop.wait(), timeout=_LOOK_SECONDS)
            self._changed.clear()
            self._kill_fenced()
            self.look()

    def look(self) -> None:
        """Called now and then."""

    def _kill_fenced(self) -> None:
        running = {rank.number: rank for rank in self._ranks if rank.is_running}
        for number in self._fence.beyond({each: rank.pid for each, rank in running.items()}):
            running[number].end_group(signal.SIGKILL, STOPPED)

    def _on_end(self, rank: Rank) -> None:
        """It is done with at once: a run is long, and others take its place."""
        self._tell_guard()
        self._ranks.remove(rank)
        ending = self._ending(rank)
        self._endings.append(ending)
        self.note_end(ending)
        held = rank.output.held()
        if held is not None and (self._is_echo(ending) or is_interrupt(held.text())):
            held.drop()
        sweep = asyncio.create_task(rank.sweep())
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)
        self._changed.set()

    def _is_echo(self, ending: Ending) -> bool:
        """Whether it says no more than that the run has ended."""
        return not ending.is_own

    async def _clean_up(self) -> None:
        await super()._clean_up()
        await asyncio.gather(*self._sweeps)


class ElasticLaunch(WorkerLaunch):
    """Holds the roster."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self._config.elastic is not None
        bounds, server = self._config.elastic, self._place.server
        self._crew = Crew(server, self._config.ranks, bounds, self._start_if_possible)
        if self._job is not None:
            self._job.variables_of = self._variables_of
            if not self._job.survives_losses:
                raise LaunchError(
                    "An elastic run over MPI needs an Open MPI of version 5 or newer, which goes "
                    "on when a rank is lost (--with-ft ulfm), but mpiexec is another. Choose "
                    "--backend shm or gloo."
                )
        self._stragglers = Stragglers()
        self._farewell = 0.0
        self._has_begun = False

    async def _start(self) -> None:
        config, place = self._config, self._place
        shared = {name: self._common[name] for name in _SHARED if name in self._common}
        self._crew.desk.variables = shared
        self._crew.desk.on_world = _in_loop(self._say_change)
        if config.log_dir is not None:
            self._err.say(f"shoal: workers write to {config.log_dir}/worker-K.log")
        host = config.host if config.is_between_hosts else "localhost"
        host = f"[{host}]" if ":" in host else host
        port = config.port if config.is_between_hosts else place.master_port
        script = " ".join(map(shlex.quote, config.target()))
        if self._job is None:
            self._err.say(f"shoal: others join by: shoal launch --join {host}:{port} {script}")
        self._crew.begin()
        if self._job is not None:
            words = ScreenOutput("mpiexec", self._err, self._err)
            await self._job.start(self._common, words, self._output_of, self._add)
        self._has_begun = True

    def _variables_of(self, number: int) -> dict[str, str]:
        return worker_variables(number, number, self._config.ranks)

    async def _clean_up(self) -> None:
        self._crew.end()
        await super()._clean_up()

    def _start_if_possible(self, number: int, rank: int, size: int) -> None:
        """The run goes on without one that cannot be started once others were."""
        if self._job is not None:
            return  # mpiexec starts all of them
        try:
            self.start_worker(number, rank, size)
        except (LaunchError, OSError) as error:
            if not self._has_begun:
                raise
            self._err.say(f"shoal: worker {number} cannot be started: {error}")
            self._crew.desk.end(number, "it could not be started")

    def is_going_on(self) -> bool:
        """Whether somebody trains, or will; what has come to a good end may take its time."""
        if self._crew.is_going_on:
            return True
        for number in self._crew.end():
            for rank in [each for each in self._ranks if each.number == number]:
                rank.end_group(signal.SIGKILL, "not needed any more")
        return self._crew.has_result and (bool(self._ranks) or self._is_listened_to())

    def _is_listened_to(self) -> bool:
        """Whether workers of other launchers have yet to hear from here that the run has ended."""
        self._farewell = self._farewell or time.monotonic() + _FAREWELL_SECONDS
        return self._crew.desk.is_listened_to() and time.monotonic() < self._farewell

    def look(self) -> None:
        """Tells who is slow."""
        for text in self._stragglers.news(self._crew.roster, self._crew.desk.progress):
            self._err.say(f"shoal: {text}")

    def note_end(self, ending: Ending) -> None:
        """Another takes its place, if one is left."""
        if self._signals.stop.is_set():
            self._crew.end()
        self._crew.note_end(ending.rank, ending.code, ending.reason)

    def _is_echo(self, ending: Ending) -> bool:
        is_told = ending.record is not None and ending.record.type == "LaunchError"
        return super()._is_echo(ending) or (is_told and bool(self._crew.roster.refusal))

    def _say_change(self, announcement: Announcement) -> None:
        if announcement.generation > 1:
            self._err.say(f"shoal: {change_text(self._crew.roster, announcement)}")

    def _report(self, signals: Signals) -> int:
        assert self._config.elastic is not None
        own = [each for each in self._endings if each.code and not self._is_echo(each)]
        account = RunAccount(self._crew.roster, own, self._config.elastic.min_ranks)
        if signals.stopped_by is not None:
            self._err.say(f"shoal: stopped by {signals.stopped_by.name}.")
            return 128 + signals.stopped_by
        if not self._crew.roster.worlds and not own:
            self._say_if_nobody_joined()
        elif text := account.text(is_shown=self._config.log_dir is None):
            self._err.say(text)
        return account.exit_code


def _in_loop(say: Callable[[Announcement], None]) -> Callable[[Announcement], None]:
    """The server's thread tells; what is said comes from the loop's."""
    loop = asyncio.get_running_loop()

    def tell(announcement: Announcement) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(say, announcement)

    return tell

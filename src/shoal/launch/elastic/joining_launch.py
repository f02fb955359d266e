"""`shoal launch --join`: workers for an elastic run that another launcher has started."""

from __future__ import annotations

import signal
from typing import Any

from shoal.launch.elastic.elastic_launch import WorkerLaunch
from shoal.launch.elastic.joined_run import JoinedRun
from shoal.launch.script.node_launch import Signals
from shoal.launch.script.summary import Ending


class JoiningLaunch(WorkerLaunch):
    """Starts workers under the numbers that the run's holder gives, and tells it of their ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._place, JoinedRun)
        self._run = self._place
        self._unneeded: list[int] = []

    async def _start(self) -> None:
        for _ in range(self._config.ranks):
            self.start_worker(self._run.expect())

    def variables(self) -> dict[str, str]:
        """Those of the run's other workers count."""
        return {**super().variables(), **self._run.variables}

    def is_going_on(self) -> bool:
        """A worker whose holder has hung up hears of that by itself, and has the grace to say so.

        One that is cut off would hear of nothing, and the others go on without it.
        """
        is_there = not self._ranks or self._run.is_there()
        if self._run.is_cut_off:
            for rank in self._ranks:
                rank.end_group(signal.SIGKILL, "cut off from the run's launcher, and killed")
        return bool(self._ranks) and is_there

    def note_end(self, ending: Ending) -> None:
        """The holder cannot see the process."""
        is_good = ending.code == 0
        was_member = self._run.note_end(ending.rank, ending.reason, is_good=is_good)
        if is_good and not was_member:
            self._unneeded.append(ending.rank)

    def _report(self, signals: Signals) -> int:
        for number in self._unneeded:
            self._err.say(f"shoal: worker {number} was not needed: the run has come to its end.")
        failed = [each for each in self._endings if each.code]
        for each in failed:
            self._err.say(f"shoal: worker {each.rank}: {each.reason}")
        if signals.stopped_by is not None:
            self._err.say(f"shoal: stopped by {signals.stopped_by.name}.")
            return 128 + signals.stopped_by
        return failed[-1].exit_code if failed else 0

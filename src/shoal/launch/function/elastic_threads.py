"""Runs one function on threads that come and go: one that fails is lost, and may be replaced."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from shoal.comm.memory.membership import Gate, Member, ThreadMembership
from shoal.comm.world import current
from shoal.errors import LaunchError
from shoal.launch.function.call import copy_call
from shoal.launch.function.outcome import Outcome
from shoal.meeting.elastic_options import Elastic
from shoal.system.deadline import wait_until
from shoal.system.site import describe
from shoal.torch_support.random_state import RandomState

_GRACE_S = 2.0
_POLL_S = 0.001
_LOOK_EVERY_S = 1.0


def run_elastic_threads(
    fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, timeout: float, bounds: Elastic
) -> list[Outcome]:
    """The outcomes of those who are members at the end, by rank; a failure if too few are left."""
    return _ElasticThreads(fn, args, ranks, timeout, bounds).run()


class _ElasticThreads:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        ranks: int,
        timeout: float,
        bounds: Elastic,
    ) -> None:
        self._call, self._timeout, self._bounds = (fn, args), timeout, bounds
        self._gate = Gate(ranks, timeout, bounds, self._start)
        self._outcomes: dict[int, Outcome] = {}
        self._threads: list[threading.Thread] = []

    def run(self) -> list[Outcome]:
        random = RandomState.capture()
        try:
            for member in list(self._gate.members):
                self._start(member)
            self._join()
        except BaseException as error:
            self._gate.close(LaunchError(f"the caller was interrupted by {error!r}"))
            self._gate.simulator.interrupt(error)
            wait_until(
                lambda: not set(self._threads) & set(threading.enumerate()), _GRACE_S, _POLL_S
            )
            raise
        finally:
            random.restore()
        last = [self._outcomes[member.number] for member in self._gate.members]
        done = [outcome for outcome in last if not outcome.failed]
        if len(done) >= self._bounds.min_ranks:
            return done
        return self._failures()

    def _failures(self) -> list[Outcome]:
        """The last of their own: the run could go on after those before."""
        failures = [outcome for outcome in self._outcomes.values() if outcome.failed]
        own = [each for each in failures if not isinstance(each.error, LaunchError)]
        if not own:
            return failures
        return [max(own, key=lambda each: each.failed_at or 0.0)]

    def _start(self, member: Member) -> None:
        outcome = self._outcomes[member.number] = Outcome(member.number, failed_at=time.monotonic())
        thread = threading.Thread(
            target=contextvars.Context().run,
            args=(self._run_rank, member, outcome, copy_call(*self._call)),
            name=f"shoal-rank-{member.number}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _join(self) -> None:
        while alive := [thread for thread in list(self._threads) if thread.is_alive()]:
            alive[0].join(_LOOK_EVERY_S)
            if self._gate.simulator.is_abandoned(thread.is_alive() for thread in self._threads):
                raise self._gate.simulator.abandoned()

    def _run_rank(self, member: Member, outcome: Outcome, call: Any) -> None:
        torch.get_num_threads()  # see `run_threads`, also for the next line
        fate, is_lost = "it has come to the end of its function", False
        membership = ThreadMembership(self._gate, member, self._timeout)
        with torch.autograd.set_multithreading_enabled(False):
            try:
                membership.begin()
                fn, args = call
                outcome.value = fn(*args)
                outcome.failed_at = None
            except BaseException as error:
                is_free = member.is_leaving or member.rank is None
                fate, is_lost = describe(error), not (is_free and _is_exit(error))
                outcome.error, outcome.failed_at = error, time.monotonic()
                outcome.traceback = "".join(traceback.format_exception(error))
                current().fail(error) if is_lost else None
            finally:
                del call
                membership.end()
                self._gate.end(member, fate, is_lost=is_lost)


def _is_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)

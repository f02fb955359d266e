"""When each pass of a schedule happens, if passes take known times and messages none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.strategies.pipeline.schedule.schedules import Pass, Schedule, Tick

COSTS: Mapping[Pass, float] = {Pass.FORWARD: 1.0, Pass.BACKWARD: 2.0, Pass.WEIGHTS: 1.0}
"""Backward takes about twice as long as forward, half of it for the weights."""


class Span(NamedTuple):
    """A tick with the rank that did it and the times of its start and stop."""

    rank: int
    tick: Tick
    start: float
    stop: float


def simulate(schedule: Schedule, costs: Mapping[Pass, float] | None = None) -> list[Span]:
    """Plays a schedule; raises if ranks wait for each other for ever.

    ``costs`` are for a whole chunk of the model; where weights have passes of their own and no
    costs are given, backward takes as long as they do.

    Example:
        >>> spans = simulate(make_schedule("gpipe", 2, 2), dict.fromkeys(Pass, 1.0))
        >>> max(span.stop for span in spans)
        6.0
    """
    costs = default_costs(schedule) if costs is None else costs
    num_chunks = 1 + max(tick.chunk for ticks in schedule for tick in ticks)
    done: dict[Tick, float] = {}
    clocks, num_done = [0.0] * len(schedule), [0] * len(schedule)
    spans: list[Span] = []
    while any(count < len(ticks) for count, ticks in zip(num_done, schedule, strict=True)):
        has_moved = False
        for rank, ticks in enumerate(schedule):
            while num_done[rank] < len(ticks):
                tick = ticks[num_done[rank]]
                needed = needs(tick, num_chunks)
                if any(need not in done for need in needed):
                    break
                start = max([clocks[rank], *(done[need] for need in needed)])
                clocks[rank] = done[tick] = start + costs[tick.kind]
                spans.append(Span(rank, tick, start, clocks[rank]))
                num_done[rank] += 1
                has_moved = True
        if not has_moved:
            raise ValueError("the schedule never ends: ranks wait for each other")
    return spans


def default_costs(schedule: Schedule) -> Mapping[Pass, float]:
    """One for forward, two for backward, or one for each half of it."""
    is_split = any(_delays_weights(ticks) for ticks in schedule)
    return {**COSTS, Pass.BACKWARD: 1.0} if is_split else COSTS


def _delays_weights(ticks: Sequence[Tick]) -> bool:
    return any(tick.kind is Pass.WEIGHTS for tick in ticks)


def needs(tick: Tick, num_chunks: int) -> list[Tick]:
    """The ticks that must be done before this one."""
    kind, number, chunk = tick
    if kind is Pass.FORWARD:
        return [Tick(kind, number, chunk - 1)] if chunk else []
    if kind is Pass.WEIGHTS:
        return [Tick(Pass.BACKWARD, number, chunk)]
    later = [Tick(kind, number, chunk + 1)] if chunk + 1 < num_chunks else []
    return [Tick(Pass.FORWARD, number, chunk), *later]


def bubble(spans: Sequence[Span]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they wait.

    Example:
        >>> bubble(simulate(make_schedule("1f1b", 2, 1)))
        0.5
    """
    num_ranks = 1 + max(span.rank for span in spans)
    length = max(span.stop for span in spans) - min(span.start for span in spans)
    busy = sum(span.stop - span.start for span in spans)
    return 1.0 - busy / (num_ranks * length)


def peak_in_flight(ticks: Sequence[Tick]) -> int:
    """How many micro-batches' activations a rank has at most; each of its chunks counts."""
    last = Pass.WEIGHTS if _delays_weights(ticks) else Pass.BACKWARD
    count = peak = 0
    for tick in ticks:
        count += (tick.kind is Pass.FORWARD) - (tick.kind is last)
        peak = max(peak, count)
    return peak

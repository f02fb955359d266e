"""When each pass of a schedule happens, if passes take known times and messages none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.strategies.pipeline.schedule.tick import Pass, Schedule, Tick

COSTS: Mapping[Pass, float] = {Pass.FORWARD: 1.0, Pass.BACKWARD: 2.0, Pass.WEIGHTS: 1.0}
"""Backward takes about twice as long as forward, half of it for the weights."""


class Span(NamedTuple):
    """When a rank worked on what."""

    rank: int
    tick: Tick
    start: float
    stop: float


def simulate(schedule: Schedule, costs: Mapping[Pass, float] | None = None) -> list[Span]:
    """Walks a schedule; raises if ranks wait for each other for ever.

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
    clocks, places = [0.0] * len(schedule), [0] * len(schedule)
    spans: list[Span] = []
    while any(place < len(ticks) for place, ticks in zip(places, schedule, strict=True)):
        moved = False
        for rank, ticks in enumerate(schedule):
            while places[rank] < len(ticks):
                tick = ticks[places[rank]]
                needed = needs(tick, num_chunks)
                if any(need not in done for need in needed):
                    break
                start = max([clocks[rank], *(done[need] for need in needed)])
                clocks[rank] = done[tick] = start + costs[tick.work]
                spans.append(Span(rank, tick, start, clocks[rank]))
                places[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the schedule never ends: ranks wait for each other")
    return spans


def default_costs(schedule: Schedule) -> Mapping[Pass, float]:
    """One for forward, two for backward, or one for each half of it."""
    is_split = any(tick.work is Pass.WEIGHTS for ticks in schedule for tick in ticks)
    return {**COSTS, Pass.BACKWARD: 1.0} if is_split else COSTS


def needs(tick: Tick, num_chunks: int) -> list[Tick]:
    """What must have been done before."""
    work, number, chunk = tick
    if work is Pass.FORWARD:
        return [Tick(work, number, chunk - 1)] if chunk else []
    if work is Pass.WEIGHTS:
        return [Tick(Pass.BACKWARD, number, chunk)]
    behind = [Tick(work, number, chunk + 1)] if chunk + 1 < num_chunks else []
    return [Tick(Pass.FORWARD, number, chunk), *behind]


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
    """How many micro-batches' activations a rank holds at most; its chunks count each."""
    is_split = any(tick.work is Pass.WEIGHTS for tick in ticks)
    last = Pass.WEIGHTS if is_split else Pass.BACKWARD
    held = peak = 0
    for tick in ticks:
        held += (tick.work is Pass.FORWARD) - (tick.work is last)
        peak = max(peak, held)
    return peak

"""Schedules: what each rank of a pipeline does in which order, and when. Pure.

A schedule is a function that yields one rank's ticks, and an entry of `SCHEDULES`.

[Note: schedules]
A schedule is the order in which one rank does its passes. It says nothing about time: a rank starts
a pass as soon as what the pass needs has arrived. With 4 stages and 4 micro-batches, one column for
each unit of time:

    gpipe         F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3      all forward, then all backward
                  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
                  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
                  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

    1f1b          F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3      a micro-batch goes back as soon
                  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .       as it can: a rank holds the
                  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .       activations of at most `stages`
                  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .       micro-batches

"interleaved" gives several chunks to each rank, so that the wait at the beginning and the end is
that of a chunk, not of a stage. "zero-bubble" is 1f1b whose backward is cut in two: the gradients
of the inputs, which the previous rank waits for, come first, and the gradients of the weights fill
the gaps. A rank delays as many of the latter as there are ranks before it, so that all ranks hold
the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from shoal.comm.operation.partition import offsets, split_sizes


class Pass(StrEnum):
    """The kinds of passes of a micro-batch through a chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    """With the gradients of the weights, unless these have passes of their own."""
    WEIGHTS = "W"
    """The gradients of the weights, where a schedule delays them."""


class Tick(NamedTuple):
    """One pass of one micro-batch through one chunk, both by their numbers in batch and model."""

    kind: Pass
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        """As in drawings: ``F3`` is the forward of micro-batch 3."""
        return f"{self.kind}{self.micro_batch}"


Schedule = list[list[Tick]]
"""What each rank does, in order."""


def gpipe(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Tick]:
    """All micro-batches forward, then all backward."""
    for number in range(micro_batches):
        yield Tick(Pass.FORWARD, number, rank)
    for number in range(micro_batches):
        yield Tick(Pass.BACKWARD, number, rank)


def one_forward_one_backward(
    rank: int, stages: int, micro_batches: int, chunks: int
) -> Iterator[Tick]:
    """As many forward as there are later ranks, then one backward for each forward."""
    ahead = min(stages - 1 - rank, micro_batches)
    for number in range(ahead):
        yield Tick(Pass.FORWARD, number, rank)
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            yield Tick(Pass.FORWARD, number + ahead, rank)
        yield Tick(Pass.BACKWARD, number, rank)


def interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Tick]:
    """1f1b over chunks: a round of micro-batches through one chunk, then through the next."""
    # No round has fewer micro-batches than stages: its first would not be back yet.
    rounds = split_sizes(micro_batches, max(micro_batches // stages, 1))
    order = [
        (number, turn)
        for first, size in zip(offsets(rounds), rounds, strict=False)
        for turn in range(chunks)
        for number in range(first, first + size)
    ]
    ahead = min(2 * (stages - 1 - rank) + (chunks - 1) * rounds[0], len(order))
    for step in range(len(order) + ahead):
        if step < len(order):
            number, turn = order[step]
            yield Tick(Pass.FORWARD, number, turn * stages + rank)
        if step >= ahead:
            number, turn = order[step - ahead]
            yield Tick(Pass.BACKWARD, number, (chunks - 1 - turn) * stages + rank)


def zero_bubble(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Tick]:
    """1f1b with the gradients of weights delayed, by one more micro-batch on each rank."""
    for tick in one_forward_one_backward(rank, stages, micro_batches, chunks):
        yield tick
        if tick.kind is Pass.BACKWARD and tick.micro_batch >= rank:
            yield Tick(Pass.WEIGHTS, tick.micro_batch - rank, rank)
    for number in range(max(micro_batches - rank, 0), micro_batches):
        yield Tick(Pass.WEIGHTS, number, rank)


class ScheduleEntry(NamedTuple):
    """A schedule and what it needs.

    Attributes:
        ticks: Yields one rank's ticks, from the rank, the number of stages, of micro-batches and
            of chunks on each rank.
        default_chunks: Chunks on each rank unless the user chooses. If it is 1, the schedule
            allows no other number.
        delays_weights: Whether the gradients of weights have passes of their own.
    """

    ticks: Callable[[int, int, int, int], Iterator[Tick]]
    default_chunks: int = 1
    delays_weights: bool = False


SCHEDULES = {
    "gpipe": ScheduleEntry(gpipe),
    "1f1b": ScheduleEntry(one_forward_one_backward),
    "interleaved": ScheduleEntry(interleaved, default_chunks=2),
    "zero-bubble": ScheduleEntry(zero_bubble, delays_weights=True),
}
"""All schedules, by the names that users know."""


def choose_chunks(name: str, chunks: int | None = None) -> int:
    """The number of chunks on each rank; refuses unknown schedules and impossible numbers."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {name!r}")
    default = SCHEDULES[name].default_chunks
    if chunks is None:
        return default
    if chunks < 1 or (chunks > 1 and default == 1):
        several = [f'"{name}"' for name, entry in SCHEDULES.items() if entry.default_chunks > 1]
        raise ValueError(
            f"only schedule={' or '.join(several)} has several chunks a rank; got chunks={chunks} "
            f"with schedule={name!r}"
        )
    return chunks


@lru_cache(maxsize=256)
def make_ticks(
    name: str, rank: int, stages: int, micro_batches: int, chunks: int
) -> tuple[Tick, ...]:
    """What one rank does, in order; made once for each choice of the arguments."""
    return tuple(SCHEDULES[name].ticks(rank, stages, micro_batches, chunks))


def make_schedule(
    name: str, stages: int, micro_batches: int, chunks: int | None = None
) -> Schedule:
    """What each rank does, in order.

    Args:
        name: One of `SCHEDULES`.
        stages: How many ranks the pipeline has.
        micro_batches: How many parts a batch is cut into.
        chunks: How many parts of the model each rank has; by default what the schedule takes, two
            for "interleaved" and otherwise one.

    Example:
        >>> [str(tick) for tick in make_schedule("1f1b", 2, 3)[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    chunks = choose_chunks(name, chunks)
    if stages < 1 or micro_batches < 1:
        raise ValueError(
            f"need at least one stage and one micro-batch; got {stages} and {micro_batches}"
        )
    return [list(make_ticks(name, rank, stages, micro_batches, chunks)) for rank in range(stages)]


# When each pass happens, if passes take known times and messages none --------------------------

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
    is_split = any(map(_delays_weights, schedule))
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


def peak_in_one_chunk(ticks: Sequence[Tick]) -> int:
    """How many micro-batches' activations a rank has at most of one of its chunks."""
    chunks = {tick.chunk for tick in ticks}
    return max(peak_in_flight([t for t in ticks if t.chunk == chunk]) for chunk in chunks)

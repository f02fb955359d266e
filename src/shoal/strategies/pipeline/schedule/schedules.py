"""Schedules: what each rank of a pipeline does in which order, as pure functions.

Look here to add or change a schedule: it is a function that yields one rank's ticks, and an entry
of `SCHEDULES`.

[Note: schedules]
A pipeline has *ranks* (stages) and the model is cut into *chunks*: one for each rank, or several,
so that chunk ``c`` is on rank ``c % stages``. A schedule is the order in which one rank does its
passes. It says nothing about time: a rank starts a pass as soon as what the pass needs has arrived.
With 4 stages and 4 micro-batches, one column for each unit of time:

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

from collections.abc import Callable, Iterator
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
    """One pass of one micro-batch through one chunk.

    Attributes:
        kind: Which pass.
        micro_batch: The number of the micro-batch in its batch.
        chunk: The number of the chunk, counted from the model's beginning.
    """

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

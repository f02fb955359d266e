"""Schedules: which rank works on which micro-batch when, as pure functions.

[Note: schedules]
A pipeline has *ranks* (stages) and the model is cut into *chunks*: one for each rank, or several,
dealt out like cards, so that chunk ``c`` is on rank ``c % stages``. A schedule is the order in
which one rank does its passes. It says nothing about time: a rank goes on as soon as what it needs
has arrived. With 4 stages and 4 micro-batches, one column for each unit of time:

    gpipe         F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3      all forward, then all backward
                  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
                  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
                  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

    1f1b          F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3      as soon as one is back, it is
                  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .       done with: at most `stages`
                  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .       micro-batches are under way
                  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

"interleaved" deals out several chunks to each rank, so that the wait at the beginning and the end
is that of a chunk, not of a stage. "zero-bubble" is 1f1b whose backward is cut in two: what the
rank before waits for (the gradients of the inputs) comes first, the gradients of the weights fill
the gaps. A rank puts off as many of them as there are ranks before it, so that everybody has the
same number of micro-batches under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.comm.operation.partition import offsets, split_sizes
from shoal.strategies.pipeline.schedule.tick import Pass, Schedule, Tick


def gpipe(rank: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterator[Tick]:
    """All micro-batches forward, then all backward."""
    for number in range(micro_batches):
        yield Tick(Pass.FORWARD, number, rank)
    for number in range(micro_batches):
        yield Tick(Pass.BACKWARD, number, rank)


def one_forward_one_backward(
    rank: int, stages: int, micro_batches: int, chunks: int = 1
) -> Iterator[Tick]:
    """As many forward as there are ranks behind, then one backward for each forward."""
    ahead = min(stages - 1 - rank, micro_batches)
    for number in range(ahead):
        yield Tick(Pass.FORWARD, number, rank)
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            yield Tick(Pass.FORWARD, number + ahead, rank)
        yield Tick(Pass.BACKWARD, number, rank)


def interleaved(rank: int, stages: int, micro_batches: int, chunks: int = 2) -> Iterator[Tick]:
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


def zero_bubble(rank: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterator[Tick]:
    """1f1b with the gradients of weights put off, by one more on each rank."""
    for tick in one_forward_one_backward(rank, stages, micro_batches):
        yield tick
        if tick.work is Pass.BACKWARD and tick.micro_batch >= rank:
            yield Tick(Pass.WEIGHTS, tick.micro_batch - rank, rank)
    for number in range(max(micro_batches - rank, 0), micro_batches):
        yield Tick(Pass.WEIGHTS, number, rank)


SCHEDULES: dict[str, Callable[[int, int, int, int], Iterator[Tick]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""All of them, by the name that users know."""


def check_schedule(name: str, chunks: int) -> None:
    """Refuses what there is not."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {name!r}")
    if chunks < 1 or (chunks > 1 and name != "interleaved"):
        raise ValueError(
            f'only schedule="interleaved" has several chunks a rank; got chunks={chunks} with '
            f"schedule={name!r}"
        )


def make_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """What each rank does, in order.

    Args:
        name: "gpipe", "1f1b", "interleaved" or "zero-bubble".
        stages: How many ranks the pipeline has.
        micro_batches: How many parts a batch is cut into.
        chunks: How many parts of the model each rank has; more than one only if interleaved.

    Example:
        >>> [str(tick) for tick in make_schedule("1f1b", 2, 3)[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    check_schedule(name, chunks)
    if stages < 1 or micro_batches < 1:
        raise ValueError(
            f"need at least one stage and one micro-batch; got {stages} and {micro_batches}"
        )
    make = SCHEDULES[name]
    return [list(make(rank, stages, micro_batches, chunks)) for rank in range(stages)]

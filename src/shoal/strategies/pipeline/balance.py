"""Which micro-batches' activations lie on another stage, so that no stage has far more than others.

[Note: balanced stages]
In 1f1b the first of p stages has up to p micro-batches under way, the last has one. A stage above a
limit hands the activations of some micro-batches to one below it, from their forward to their
backward. All of it follows from the schedule, so every rank works out the same without a word, and
who holds them takes no part: nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from shoal.strategies.pipeline.schedules import Pass, Schedule, Tick, make_schedule, peak_in_flight

Key = tuple[int, int]
"""A chunk and a micro-batch: what has activations on one rank."""


@lru_cache(maxsize=64)
def plan_holders(
    name: str, stages: int, micro_batches: int, chunks: int
) -> tuple[dict[Key, int], ...]:
    """For each rank, which other rank holds what; what is not named stays.

    Example:
        >>> plan_holders("1f1b", 4, 8, 1)[0]
        {(0, 3): 3, (0, 6): 2}
    """
    schedule = make_schedule(name, stages, micro_batches, chunks)
    most = max(map(peak_in_flight, schedule))
    for limit in range(1, most):
        found = _within(schedule, limit)
        if found is not None:
            return found
    return tuple({} for _ in schedule)


def _within(schedule: Schedule, limit: int) -> tuple[dict[Key, int], ...] | None:
    """All that is handed over so that no rank has more than ``limit``; None if it cannot be."""
    room = [limit - peak_in_flight(ticks) for ticks in schedule]
    plans: list[dict[Key, int]] = []
    for ticks in schedule:
        slots = _slots(ticks, _handed_over(ticks, limit))
        holders: list[int] = []
        for _ in range(1 + max(slots.values(), default=-1)):
            holder = max(range(len(room)), key=lambda rank: room[rank])
            if room[holder] < 1:
                return None
            room[holder] -= 1
            holders.append(holder)
        plans.append({key: holders[slot] for key, slot in slots.items()})
    return tuple(plans)


def _handed_over(ticks: Sequence[Tick], limit: int) -> set[Key]:
    """What a rank must not keep: of what it has too much of, that which it needs last."""
    out: set[Key] = set()
    for tick, alive in _lives(ticks):
        own = (tick.chunk, tick.micro_batch)
        is_back = tick.kind is not Pass.FORWARD  # what was handed over is here again
        here = [key for key in alive if key not in out or (is_back and key == own)]
        others = [key for key in here if not (is_back and key == own)]
        out.update(others[len(others) - max(0, len(here) - limit) :])
    return out


def _slots(ticks: Sequence[Tick], out: Collection[Key]) -> dict[Key, int]:
    """Numbers for what is handed over; at no time have two the same."""
    found: dict[Key, int] = {}
    for tick, alive in _lives(ticks):
        key = (tick.chunk, tick.micro_batch)
        if tick.kind is Pass.FORWARD and key in out:
            taken = {found[each] for each in alive if each in found}
            found[key] = min(set(range(len(taken) + 1)) - taken)
    return found


def _lives(ticks: Sequence[Tick]) -> list[tuple[Tick, list[Key]]]:
    """For each tick what has activations while it runs, the oldest first."""
    last = Pass.WEIGHTS if any(tick.kind is Pass.WEIGHTS for tick in ticks) else Pass.BACKWARD
    alive: list[Key] = []
    found = []
    for tick in ticks:
        key = (tick.chunk, tick.micro_batch)
        if tick.kind is Pass.FORWARD:
            alive.append(key)
        found.append((tick, list(alive)))
        if tick.kind is last:
            alive.remove(key)
    return found

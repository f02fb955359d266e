"""The cheapest way to keep activations within some bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Bytes are counted in so many steps of the budget, rounded up, so that no choice goes over it.
_STEPS = 2000


class Cost(NamedTuple):
    """What one way to call a block takes: bytes until backward, and seconds more in backward."""

    num_bytes: int
    seconds: float


Costs = Mapping[str, Cost]
"""What a block costs, by the name of what it does: "none", "selective", "full"."""


def choose(
    blocks: Mapping[str, Costs], num_bytes: int, in_flight: int = 1
) -> dict[str, str] | None:
    """What each block does so that all fit, in the least time; None if nothing fits.

    A block that is computed again has all of its activations for a moment, besides what the others
    keep. So much is set aside, for the largest of them.

    Args:
        blocks: What each costs.
        num_bytes: For all together.
        in_flight: How often each block's bytes are there at the same time.

    Example:
        >>> costs = {"none": Cost(100, 0.0), "full": Cost(10, 1.0)}
        >>> choose({"a": costs, "b": costs}, 210)
        {'a': 'none', 'b': 'none'}
        >>> choose({"a": costs, "b": costs}, 130)
        {'a': 'full', 'b': 'full'}
    """
    most = [costs["none"].num_bytes for costs in blocks.values()]
    if in_flight * sum(most) <= num_bytes:
        return dict.fromkeys(blocks, "none")
    return _cheapest(blocks, (num_bytes - max(most)) // in_flight)


def _cheapest(blocks: Mapping[str, Costs], num_bytes: int) -> dict[str, str] | None:
    """By dynamic programming: the least time for each number of steps that are used."""
    if num_bytes <= 0:
        return None
    unit = max(1.0, num_bytes / _STEPS)
    limit = int(num_bytes / unit)
    least = np.zeros(limit + 1)
    taken: list[list[np.ndarray]] = []
    for costs in blocks.values():
        times = np.stack(list(_times(least, costs, unit)))
        taken.append(list(times == times.min(axis=0)))
        least = times.min(axis=0)
    if not np.isfinite(least[limit]):
        return None
    return _walk_back(blocks, taken, limit, unit)


def _times(least: np.ndarray, costs: Costs, unit: float) -> Iterator[np.ndarray]:
    """For each way to call one more block, the least time within each number of steps."""
    for cost in costs.values():
        steps = min(_steps(cost, unit), len(least))
        times = np.full(len(least), np.inf)
        times[steps:] = least[: len(least) - steps] + cost.seconds
        yield times


def _walk_back(
    blocks: Mapping[str, Costs], taken: Sequence[Sequence[np.ndarray]], limit: int, unit: float
) -> dict[str, str]:
    found: dict[str, str] = {}
    left = limit
    for (name, costs), ways in reversed(list(zip(blocks.items(), taken, strict=True))):
        index = next(index for index, way in enumerate(ways) if way[left])
        found[name] = list(costs)[index]
        left -= _steps(costs[found[name]], unit)
    return {name: found[name] for name in blocks}


def _steps(cost: Cost, unit: float) -> int:
    return int(np.ceil(cost.num_bytes / unit))

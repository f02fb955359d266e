"""Which processor cores there are to use."""

from __future__ import annotations

import os


def own_cores() -> frozenset[int]:
    """Numbers of the cores this process may use; a launcher may have given it just some."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        return frozenset(range(os.cpu_count() or 1))


def num_cores() -> int:
    """How many these are."""
    return len(own_cores())

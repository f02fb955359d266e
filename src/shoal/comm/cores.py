"""How many processor cores there are to use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores this process may use; a launcher or a container may have given it just some."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1

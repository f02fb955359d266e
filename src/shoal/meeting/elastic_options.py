"""What a user says of a run whose ranks come and go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elastic:
    """How few and how many ranks a run may have, and who takes the place of those that die.

    Attributes:
        min_ranks: With fewer than these the run ends.
        max_ranks: More than these are never members; None for no limit.
        spares: Ranks that are started besides, and wait until one is needed.
        restarts: How many ranks are started anew in place of those that died, over the whole run.

    Example:
        >>> Elastic(min_ranks=2, spares=1)
        Elastic(min_ranks=2, max_ranks=None, spares=1, restarts=0)
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    spares: int = 0
    restarts: int = 0

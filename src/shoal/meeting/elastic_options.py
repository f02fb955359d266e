"""What a run is started with whose ranks may come and go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elastic:
    """Bounds of an elastic run, and who takes the place of ranks that are lost.

    Attributes:
        min_ranks: With fewer the run ends.
        max_ranks: More are not let in; as many as come by default.
        spares: How many ranks wait, beside those that train, to take the place of a lost one.
        restarts: How many lost ranks are started anew once there is no spare.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    spares: int = 0
    restarts: int = 0

"""What is put to the test, and what the ranks find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.verification.comparison import Difference
from shoal.verification.trainers.trainer import Build

Weight = Callable[[Any, Any], Any]
"""How much a local batch counts, from its inputs and targets."""
REFERENCES = ("batch", "split")


@dataclass(frozen=True)
class Experiment:
    """What is compared with what.

    Attributes:
        build: Makes model, optimizer, batches and loss function; called anew on every rank.
        wrap: Makes model and optimizers distributed; takes ``strategy`` and the options.
        strategy: Its name.
        ranks: How many ranks.
        backend: What they communicate over.
        steps: How many steps to train.
        reference: "batch" or "split".
        tolerance: What an element may be off by; None: by the kind of its numbers.
        weight: ``weight(inputs, targets)`` is how much a rank's rows count; None: their number.
        options: Of the strategy.
    """

    build: Build
    wrap: Callable[..., Any]
    strategy: str = "ddp"
    ranks: int = 2
    backend: str = "memory"
    steps: int = 5
    reference: str = "batch"
    tolerance: float | None = None
    weight: Weight | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses what cannot be tried."""
        if self.reference not in REFERENCES:
            names = " or ".join(map(repr, REFERENCES))
            raise ValueError(f"reference must be {names}; got {self.reference!r}")
        if self.steps < 1:
            raise ValueError(f"need at least one step to compare; got {self.steps}")


@dataclass
class Findings:
    """What the ranks bring back from an experiment.

    Attributes:
        tolerance: The one that was used.
        difference: The first one, or None.
        largest: The largest differences seen, by kind.
        ranks_differ: Which ranks differ from each other in what, in words; empty if none do.
        first_move: How far the first step moved any parameter.
        num_shares: How many parts each global batch was cut into.
        num_micro_batches: How many of them each such part was cut into, in a pipeline.
    """

    tolerance: float
    difference: Difference | None
    largest: dict[str, float]
    ranks_differ: str
    first_move: float
    num_shares: int
    num_micro_batches: int = 1

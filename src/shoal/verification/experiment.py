"""What is put to the test, what the ranks find, and the report of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ShoalError
from shoal.verification.comparison import Difference
from shoal.verification.trainers.trainer import Build

Weight = Callable[[Any, Any], Any]
"""How much a local batch counts, from its inputs and targets."""
REFERENCES = ("batch", "split")
REPLAY = "replay"
"""The reference of strategies whose ranks step apart: their own definition, in one process."""


@dataclass(frozen=True)
class Experiment:
    """What is compared with what; see `shoal.verify`.

    ``build`` is called anew on every rank. ``wrap`` makes model and optimizers distributed; it
    takes ``strategy`` and the options.
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
        if self.reference not in (*REFERENCES, REPLAY):
            names = " or ".join(map(repr, REFERENCES))
            raise ValueError(f"reference must be {names}; got {self.reference!r}")
        if self.steps < 1:
            raise ValueError(f"need at least one step to compare; got {self.steps}")


@dataclass
class Findings:
    """What the ranks bring back from an experiment.

    Attributes:
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


@dataclass(frozen=True)
class Report:
    """Whether distributed training equals one process, and if not where and perhaps why.

    Attributes:
        strategy: What was put to the test.
        ranks: On how many ranks.
        backend: Over what.
        reference: "batch" or "split"; "replay" for strategies whose ranks step apart.
        steps: How many steps were asked for.
        tolerance: What an element may be off by; see `Comparison`.
        difference: The first one, or None.
        cause: The likely reason for it; empty without a difference.
        largest: The largest difference of an element seen, by kind.
        notes: What to know about the test itself.

    Example:
        >>> report = shoal.verify(build, strategy="zero3", ranks=4)
        >>> report.equal
        True
    """

    strategy: str
    ranks: int
    backend: str
    reference: str
    steps: int
    tolerance: float
    difference: Difference | None = None
    cause: str = ""
    largest: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differed by more than the tolerance, and the ranks not by a bit."""
        return self.difference is None

    def raise_if_different(self) -> None:
        """For tests: raises `ShoalError` with the whole report unless all was equal."""
        if not self.equal:
            raise ShoalError(str(self))

    def __str__(self) -> str:
        return "\n  ".join([self._headline(), *self._details()])

    def _headline(self) -> str:
        who = f"{self.strategy} on {self.ranks} ranks over {self.backend}"
        verdict = "equals" if self.equal else "DIFFERS from"
        what = "its definition in one process" if self.reference == REPLAY else "one process"
        settings = f"reference {self.reference!r}, {self.steps} steps, tolerance {self.tolerance:g}"
        return f"{who} {verdict} {what} ({settings})"

    def _details(self) -> list[str]:
        lines = [f"note: {note}" for note in self.notes]
        if self.difference is not None:
            return [
                f"first: {describe(self.difference)}",
                f"likely cause: {self.cause}",
                *lines,
            ]
        sizes = ", ".join(f"{kind} {size:.1e}" for kind, size in self.largest.items())
        ranks = "" if self.reference == REPLAY else "; the ranks are equal to the bit"
        return [f"largest differences: {sizes}{ranks}", *lines]


def describe(difference: Difference) -> str:
    """What differs, when and by how much, in one line."""
    what = {
        "loss": "the loss",
        "gradient": f"the gradient of {difference.name}",
        "parameter": f"the parameter {difference.name}",
        "ranks": f"{difference.name}, between ranks",
    }[difference.kind]
    others = f", and {difference.num_others} more like it" if difference.num_others else ""
    return f"{what} in step {difference.step}, {_amount(difference)}{others}"


def _amount(difference: Difference) -> str:
    if not math.isfinite(difference.absolute):
        return "which is not a finite number"
    percent = 100 * difference.relative
    return f"off by {difference.absolute:.2e} ({percent:.2g} % of its largest value)"

"""What was decided about an optimizer, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """How finely an optimizer's work may be divided."""

    ELEMENT_WISE = "element-wise"
    PER_PARAMETER = "per-parameter"
    GLOBAL = "global"

    def is_finer_than(self, other: Kind) -> bool:
        """Whether an optimizer of this kind may be divided further than one of the other."""
        order = list(Kind)
        return order.index(self) < order.index(other)


@dataclass(frozen=True)
class Finding:
    """Something in a step that a division would change.

    Attributes:
        finest: What the optimizer can be at best, having done this.
        what: The operation and what is wrong with it, in words.
        where: The line of the optimizer that asked for it.
    """

    finest: Kind
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}, at {self.where}" if self.where else self.what


@dataclass(frozen=True)
class Judgement:
    """What an optimizer needs to see at once, and how that is known.

    Attributes:
        kind: The decision.
        reason: Why, in a few words.
        is_watched: Whether each step is checked against the decision, because it was proved for
            tiny parameters and a few steps only.
        draws: Whether its steps were seen to draw random numbers.
        may_draw: Whether they might: larger parameters may take another branch than tiny ones.
        written_options: Names of hyperparameters that its steps change by themselves.
        marked_state: For each name in its state whether that has data of the parameter.
    """

    kind: Kind
    reason: str
    is_watched: bool = False
    draws: bool = False
    may_draw: bool = False
    written_options: frozenset[str] = frozenset()
    marked_state: Mapping[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"

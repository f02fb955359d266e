"""`Policy`: what users choose about activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RECOMPUTE = ("full", "selective")


@dataclass(frozen=True)
class Policy:
    """Which activations are dropped in forward and computed again in backward.

    Attributes:
        recompute: "full": a block keeps its inputs only; "selective": it also keeps the results of
            matrix products and convolutions with weights, and computes the rest again.
        blocks: Names of the blocks, or patterns of names ("layers.*"); by default the members of
            the model's lists of modules.

    Example:
        >>> policy = Policy("selective", blocks=["transformer.h.*"])
        >>> model = shoal.as_distributed(model, strategy="zero3", activations=policy)
    """

    recompute: str = "full"
    blocks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.recompute not in RECOMPUTE:
            raise ValueError(
                f"activations are recomputed {' or '.join(map(repr, RECOMPUTE))}; "
                f"got {self.recompute!r}"
            )
        if isinstance(self.blocks, str):
            raise TypeError(f"blocks must be a list of names; got the string {self.blocks!r}")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))


def parse_policy(activations: str | Policy | None) -> Policy | None:
    """What a user wrote for ``activations=``."""
    return Policy(activations) if isinstance(activations, str) else activations

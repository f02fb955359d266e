"""`Policy`: what users choose about activations, and what goes with what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RECOMPUTE = ("none", "full", "selective", "auto")
STORES = ("local", "host", "partition", "peer")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1]))
        raise ValueError(f"{name} must be {listed} or {choices[-1]!r}; got {value!r}")


@dataclass(frozen=True)
class Policy:
    """Which activations are dropped in forward, and where those lie that are kept for backward.

    Attributes:
        recompute: "full": a block keeps its inputs only, and backward computes the rest again;
            "selective": it also keeps the results of matrix products and convolutions with
            weights; "none": it keeps everything; "auto": whichever of these is the cheapest for
            each block, so that all fits into ``memory=``.
        store: Where what a block keeps lies until backward: "local"; "host": in host memory, if
            the model is on a GPU; "partition": each rank of a tensor group has a part of blocks'
            inputs; "peer": on another stage of the pipeline that has room.
        blocks: Names of the blocks, or patterns of names ("layers.*"); by default the members of
            the model's lists of modules.

    Example:
        >>> policy = Policy("selective", blocks=["transformer.h.*"])
        >>> model = shoal.as_distributed(model, strategy="zero3", activations=policy)
    """

    recompute: str = "full"
    store: str = "local"
    blocks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        _check_choice("recompute", self.recompute, RECOMPUTE)
        _check_choice("store", self.store, STORES)
        if isinstance(self.blocks, str):
            raise TypeError(f"blocks must be a list of names; got the string {self.blocks!r}")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.store == "partition" and self.recompute == "none":
            raise ValueError(
                'store="partition" is for the inputs of blocks, the only activations that ranks of '
                'a tensor group have alike: say recompute="full" or "selective" with it'
            )
        if self.store != "local" and self.recompute == "auto":
            raise ValueError(
                'recompute="auto" chooses what each block keeps on its own rank: it does not go '
                f"with store={self.store!r}"
            )

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is different from a model without a policy."""
        return self.recompute == "none" and self.store == "local"


PRESETS = {
    "full": Policy("full"),
    "selective": Policy("selective"),
    "offload": Policy("none", "host"),
    "partition": Policy("full", "partition"),
    "peer": Policy("full", "peer"),
    "auto": Policy("auto"),
}
"""What users may say in one word."""


def parse_policy(
    activations: str | Policy | None, memory: int | str | None = None
) -> Policy | None:
    """What a user wrote for ``activations=``; refuses a ``memory=`` that nothing goes by."""
    if isinstance(activations, str):
        _check_choice("activations", activations, tuple(PRESETS))
        activations = PRESETS[activations]
    is_automatic = activations is not None and activations.recompute == "auto"
    if is_automatic and memory is None:
        raise ValueError(
            'activations="auto" chooses what fits: say memory=, the bytes that a rank may use for '
            'parameters, gradients, optimizer state and activations together, as in memory="80GB"'
        )
    if memory is not None and not is_automatic:
        raise ValueError('memory= is what activations="auto" goes by; say both, or neither')
    return None if activations is None or activations.keeps_everything else activations


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}


def parse_bytes(memory: int | str) -> int:
    """A number of bytes, or a text as "80GB" (of 1000 bytes each step) or "80GiB" (of 1024).

    Example:
        >>> parse_bytes("1.5 GB"), parse_bytes("2KiB")
        (1500000000, 2048)
    """
    if not isinstance(memory, str):
        found = float(memory)
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", memory.lower())
        try:
            assert match is not None
            found = float(match[1]) * _UNITS[match[2]]
        except (AssertionError, KeyError, ValueError):
            found = 0.0
    if found < 1:
        raise ValueError(f'memory must be bytes, as in 80_000_000_000 or "80GB"; got {memory!r}')
    return int(found)

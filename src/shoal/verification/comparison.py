"""How far two trainings are apart, and whether that is too far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.verification.trainers.trainer import Observed

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_SIXTEEN_BIT_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same.

    Attributes:
        step: In which step, counted from 1.
        kind: "loss", "gradient", "parameter", or "ranks" if one rank differs from another.
        name: The parameter's; empty for the loss.
        absolute: The largest difference of an element.
        relative: The same, in terms of the largest value of the tensor.
        num_others: In how many other parameters the same step differs, in the same way.
    """

    step: int
    kind: str
    name: str
    absolute: float
    relative: float
    num_others: int = 0


def default_tolerance(model: nn.Module) -> float:
    """What rounding may do to a model: its coarsest kind of number decides."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    return max(
        (_TOLERANCES.get(kind, _SIXTEEN_BIT_TOLERANCE) for kind in kinds),
        default=_TOLERANCES[torch.float32],
    )


@dataclass
class Comparison:
    """Compares two observations, and remembers the first difference and the largest deviations.

    An element may be off by ``tolerance * (scale + |element|)``, where the scale is 1 for losses
    and parameters, and for gradients the largest gradient of the model.
    """

    tolerance: float
    first: Difference | None = None
    largest: dict[str, float] = field(
        default_factory=lambda: {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    )

    def compare(self, step: int, expected: Iterable[Observed], got: Iterable[Observed]) -> bool:
        """Walks one step with both; returns whether all of it is the same."""
        found: list[Difference] = []
        for one, other in zip(expected, got, strict=True):
            if one[:2] != other[:2]:
                raise ValueError(
                    f"build() must return the same model each time; got {one.name!r} in one "
                    f"process and {other.name!r} in the other"
                )
            absolute, is_within = self._deviation(one, other.value)
            self.largest[one.kind] = max(self.largest[one.kind], absolute)
            if not is_within:
                relative = absolute / max(_size(one.value), 1e-300)
                found.append(Difference(step + 1, one.kind, one.name, absolute, relative))
        if found and self.first is None:
            self.first = _with_count(found)
        return not found

    def _deviation(self, expected: Observed, got: Tensor | None) -> tuple[float, bool]:
        """The largest difference of an element, and whether all are small enough."""
        if expected.value is None and got is None:
            return 0.0, True
        # No gradient and one of zeros are told apart by what the optimizer makes of them.
        template = got if expected.value is None else expected.value
        assert template is not None
        zeros = torch.zeros((), dtype=torch.float64, device=template.device)
        left = zeros if expected.value is None else expected.value.detach().double()
        right = zeros if got is None else got.detach().double()
        if not template.numel():
            return 0.0, True
        off = (left - right).abs()
        allowed = self.tolerance * (expected.scale + left.abs())
        largest = float(off.max())
        return (largest if math.isfinite(largest) else math.inf), bool((off <= allowed).all())


def _size(tensor: Tensor | None) -> float:
    return float(tensor.detach().abs().max()) if tensor is not None and tensor.numel() else 0.0


def _with_count(found: Sequence[Difference]) -> Difference:
    first = found[0]
    others = sum(one.kind == first.kind for one in found[1:])
    return Difference(first.step, first.kind, first.name, first.absolute, first.relative, others)

"""Linear layers of which each rank has some outputs, or some inputs.

The layer stays the object it is and keeps its parameters and their names; only its class changes,
to one that communicates.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm import differentiable as collective
from shoal.strategies.tensor.region import RegionEntry, TensorGroup
from shoal.torch_internals.modules import parameters_of

if TYPE_CHECKING:
    from shoal.strategies.tensor.plan.tensor_plan import Cut

    _Base = nn.Linear
else:
    _Base = object


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer: torch's, or Hugging Face's `Conv1D`."""
    forward: Any = getattr(type(module), "forward", None)  # TorchScript's classes have none
    if "forward" in vars(module) or not (forward is nn.Linear.forward or _is_transposed(module)):
        return False
    # Where a weight is computed from others (weight norm), it is no parameter.
    return isinstance(parameters_of(module).get("weight"), nn.Parameter)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is `Conv1D` of transformers, whose weight is inputs by outputs."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if _is_transposed(module) else (columns, rows)


def dim_of(module: nn.Module, *, outputs: bool) -> int:
    """The dimension of the weight that counts the outputs, or the inputs."""
    output_dim = 1 if _is_transposed(module) else 0
    return output_dim if outputs else 1 - output_dim


class _Parallel(_Base):
    _entry: RegionEntry
    _group: TensorGroup
    _cut: Cut
    _is_whole: bool  # what a column gives, or a row takes


class ColumnParallel(_Parallel):
    """Each rank computes some outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """This rank's outputs; all of them, where nobody takes parts."""
        is_joined = self._is_whole or self._entry.is_bypassed
        entered = self._entry(input)
        with self._group.guard.own_forward(self.weight, entered):
            outputs = super().forward(entered)
        if not is_joined:
            return outputs
        self._entry.forget()
        joined = collective.join(outputs, self._group.backend, -1)
        if len(self._cut.sections) == 1:
            return joined
        order = torch.tensor(self._cut.order(self._group.backend.size), device=joined.device)
        return joined.index_select(-1, order.argsort())


class RowParallel(_Parallel):
    """Each rank has some inputs; the results are summed, and then the bias is added, once."""

    def forward(self, input: Tensor) -> Tensor:
        """The same whole outputs on every rank."""
        self._group.check()
        if self._is_whole:
            input = collective.split(input, self._group.backend, -1)
        elif self._entry.is_bypassed:
            ((start, stop),) = self._cut.runs(self._group.backend.rank, self._group.backend.size)
            input = collective.copy(input, self._group.backend)[..., start:stop]
        outputs = self._entry.leave(product(self, self._group, input))
        bias: Tensor | None = self.bias
        return outputs if bias is None else outputs + bias.to(outputs.dtype)  # as autocast would


def product(module: nn.Linear, group: TensorGroup, input: Tensor) -> Tensor:
    """A linear layer without its bias."""
    weight = module.weight
    with group.guard.own_forward(weight, input):
        if hasattr(module, "nf"):  # Conv1D
            return torch.matmul(input, weight)
        return F.linear(input, weight)


@functools.cache
def _kind(way: Any, base: Any) -> Any:
    """The communicating class for a class of layers."""
    return type(f"{way.__name__}{base.__name__}", (way, base), {"__module__": way.__module__})


def make_column(
    layer: nn.Module, group: TensorGroup, cut: Cut, entry: RegionEntry, *, is_joined: bool
) -> None:
    """Turns a layer, whose weight is split already, into a column-parallel one."""
    length = cut.length(group.backend.rank, group.backend.size)
    if hasattr(layer, "nf"):  # Conv1D computes with it
        vars(layer)["nf"] = length
    elif not is_joined:  # what gives all outputs also says so
        vars(layer)["out_features"] = length
    kind: Any = type(layer)
    layer.__class__ = _kind(ColumnParallel, kind)
    vars(layer).update(_entry=entry, _group=group, _cut=cut, _is_whole=is_joined)


def make_row(
    layer: nn.Module, group: TensorGroup, cut: Cut, entry: RegionEntry, *, is_cut: bool
) -> None:
    """Turns a layer, whose weight is split already, into a row-parallel one."""
    if not is_cut:
        length = cut.length(group.backend.rank, group.backend.size)
        setattr(layer, "nx" if hasattr(layer, "nx") else "in_features", length)
    kind: Any = type(layer)
    layer.__class__ = _kind(RowParallel, kind)
    vars(layer).update(_entry=entry, _group=group, _cut=cut, _is_whole=is_cut)

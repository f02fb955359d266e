"""How values of several ranks become one: the operations and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from shoal.torch_support.dtypes import SUMMED_IN, traits


class ReduceOp(StrEnum):
    """What a reduction computes. Every method also takes the plain name.

    ``AVERAGE`` is the sum over ranks divided, once, by the number of ranks.

    Example:
        >>> ReduceOp.parse("sum") is ReduceOp.SUM
        True
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Accepts a member or its name; ``avg``, ``mean`` and ``prod`` are understood too."""
        known = _BY_NAME.get(op)
        if known is not None:
            return known
        name = str(op).lower()
        try:
            return cls(_ALIASES.get(name, name))
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise ValueError(f"the reduce operation must be one of {names}; got {op!r}") from None


_ALIASES = {"avg": "average", "mean": "average", "prod": "product"}
_BY_NAME: dict[ReduceOp | str, ReduceOp] = {op: op for op in ReduceOp}
_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


def check_dtype(op: ReduceOp, dtype: torch.dtype) -> None:
    """Refuses the pairs whose result would surprise, and those that have none."""
    if not traits(dtype).is_computed:
        raise TypeError(f"torch cannot compute with {dtype}: convert the tensor before reducing it")
    if op is ReduceOp.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"an average needs a floating point tensor, got {dtype}: "
            "use op='sum' and divide, or convert the tensor first"
        )
    if dtype is torch.bool and op is ReduceOp.SUM:
        raise TypeError(
            "a sum of bool is ambiguous: use op='max' for any, op='min' for all, "
            "or convert to an integer type to count"
        )
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"complex numbers have no order, so op={op.value!r} cannot reduce {dtype}")


def combine(op: ReduceOp, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes ``left op right`` into ``out``, which may be either of them."""
    _COMBINE[op](left, right, out=out)


def finish(op: ReduceOp, total: Tensor, num_ranks: int) -> None:
    """Turns the sum into the average, once and in place; other reductions are complete already."""
    if op is ReduceOp.AVERAGE:
        total.div_(num_ranks)


def reduce_into(op: ReduceOp, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Reduces ``inputs`` in rank order into ``out``, so that every rank gets the same bits.

    ``out`` may be one of the inputs. Sixteen-bit floats are accumulated in float32 and
    rounded once wherever an intermediate rounding or overflow could show.
    """
    if len(inputs) == 1:
        if out.data_ptr() != inputs[0].data_ptr():
            out.copy_(inputs[0])
    elif len(inputs) == 2 and (op is not ReduceOp.AVERAGE or out.dtype not in SUMMED_IN):
        combine(op, inputs[0], inputs[1], out)
        finish(op, out, 2)
    else:
        out.copy_(_accumulate(op, inputs))


def _accumulate(op: ReduceOp, inputs: Sequence[Tensor]) -> Tensor:
    wide = SUMMED_IN.get(inputs[0].dtype, inputs[0].dtype)
    total = torch.empty_like(inputs[0], dtype=wide)
    combine(op, inputs[0].to(wide), inputs[1].to(wide), total)
    for value in inputs[2:]:
        combine(op, total, value.to(wide), total)
    finish(op, total, len(inputs))
    return total

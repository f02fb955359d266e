"""Reduce operations: their names, their arithmetic, and what is refused."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from shoal.comm.operation.reduction import ReduceOp, check_dtype, reduce_into


@pytest.mark.parametrize(
    ("name", "op"),
    [("sum", "sum"), ("AVG", "average"), ("mean", "average"), ("prod", "product"), ("Max", "max")],
)
def test_reduce_operations_have_plain_names(name, op) -> None:
    assert ReduceOp.parse(name) is ReduceOp(op)
    assert ReduceOp.parse(ReduceOp(op)) is ReduceOp(op)


@pytest.mark.parametrize("name", ["median", "", "sums"])
def test_an_unknown_operation_is_refused_with_the_choices(name) -> None:
    with pytest.raises(ValueError, match=f"sum, average, min, max, product; got '{name}'"):
        ReduceOp.parse(name)


REFERENCE = {
    "sum": lambda x: x.sum(0),
    "average": lambda x: x.sum(0) / x.shape[0],
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
    "product": lambda x: x.prod(0),
}


@hypothesis.given(
    op=st.sampled_from(list(ReduceOp)),
    count=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    into=st.integers(-1, 5),
    seed=st.integers(0, 100),
)
def test_reduce_into(op, count, dtype, into, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(9, generator=generator).to(dtype) for _ in range(count)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    exact = REFERENCE[op.value](torch.stack(inputs).to(torch.float64))
    untouched = [value.clone() for value in inputs]
    out = inputs[into] if 0 <= into < count else torch.empty(9, dtype=dtype)
    reduce_into(op, inputs, out)
    # Sixteen bits are rounded once, at the end, from sums in thirty-two.
    tolerance = (
        8 * torch.finfo(wide).eps * torch.stack(untouched).double().abs().sum(0).clamp(min=1)
    )
    rounding = torch.finfo(dtype).eps * exact.abs()
    assert bool(((out.double() - exact).abs() <= tolerance + rounding).all())
    for index, value in enumerate(inputs):
        assert value is out or torch.equal(value, untouched[index])


def test_a_sum_of_sixteen_bit_values_is_rounded_once() -> None:
    small, large = torch.tensor([1.0]), torch.tensor([256.0])
    inputs = [value.bfloat16() for value in (large, small, small, small, small)]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(ReduceOp.SUM, inputs, out)
    assert out.item() == 260.0  # one by one, each 1 would have been lost


@pytest.mark.parametrize(
    ("op", "dtype", "advice"),
    [
        ("average", torch.int64, "use op='sum' and divide"),
        ("sum", torch.bool, "op='max' for any"),
        ("min", torch.complex64, "no order"),
        ("sum", torch.float8_e5m2, "convert the tensor"),
    ],
)
def test_a_pair_without_a_meaning_is_refused_with_advice(op, dtype, advice) -> None:
    with pytest.raises(TypeError, match=advice):
        check_dtype(ReduceOp(op), dtype)

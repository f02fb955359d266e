"""Every dtype that torch has is known, or refused with an error that names it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pools
import shoal
from shoal.comm.operation.base import decode_spec, encode_spec
from shoal.comm.operation.reduction import ReduceOp, check_dtype
from shoal.torch_support.dtypes import (
    BYTES_CODE,
    TABLE,
    code_of,
    dtype_called,
    dtype_name,
    dtype_number,
    dtype_of_code,
    traits,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
KNOWN = {row.dtype for row in TABLE}
# Of quantized numbers and bare bits there is no plain tensor.
NUMBERS = sorted(
    {
        dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and not name.startswith(("q", "bits"))
    },
    key=str,
)
UNKNOWN = [dtype for dtype in NUMBERS if dtype not in KNOWN]


def test_no_dtype_has_two_rows() -> None:
    assert len(KNOWN) == len(TABLE)
    codes = [row.code for row in TABLE if row.code is not None]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("dtype", sorted(KNOWN, key=str), ids=str)
def test_a_known_dtype_is_found_by_all_its_names(dtype: torch.dtype) -> None:
    assert dtype_called(dtype_name(dtype)) is dtype
    assert decode_spec(encode_spec(torch.empty((2, 0), dtype=dtype))) == (dtype, (2, 0))
    if traits(dtype).code is None:
        assert code_of(dtype) == BYTES_CODE
    else:
        assert dtype_of_code(code_of(dtype)) is dtype


def test_numbers_in_headers_stay() -> None:
    first = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]
    assert [row.dtype for row in TABLE[:5]] == first


@pytest.mark.parametrize("dtype", sorted(KNOWN, key=str), ids=str)
def test_what_is_said_to_be_computed_can_be_added(dtype: torch.dtype) -> None:
    value = torch.zeros(1).to(dtype)
    if traits(dtype).is_computed:
        torch.add(value, value, out=value)
    else:
        with pytest.raises(TypeError, match=str(dtype)):
            check_dtype(ReduceOp.SUM, dtype)


@pytest.mark.parametrize("dtype", UNKNOWN, ids=str)
def test_an_unknown_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    for ask in (dtype_number, dtype_name, code_of, traits, lambda d: check_dtype(ReduceOp.SUM, d)):
        with pytest.raises(TypeError, match=str(dtype)):
            ask(dtype)


class WithBuffer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("extra", torch.empty(3, dtype=dtype))
        self.extra.view(torch.uint8).fill_(shoal.world().rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def wrap_each(names: list[str]) -> list[str]:
    """What comes of wrapping a model with a buffer of each dtype."""
    found = []
    for name in names:
        model = WithBuffer(getattr(torch, name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            wrapped, _ = shoal.as_distributed(model, optimizer, strategy="ddp")
            found.append(str(int(wrapped.module.extra.view(torch.uint8).max())))
        except TypeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_a_wrapped_model_may_have_a_buffer_of_any_known_dtype(backend: str) -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in NUMBERS]
    for found in pools.Team(backend, 2).run(wrap_each, names):
        for dtype, text in zip(NUMBERS, found, strict=True):
            assert text == "0" if dtype in KNOWN else str(dtype) in text, dtype

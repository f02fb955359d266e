"""Copies past the cache are copies like any other, for autograd too."""

from __future__ import annotations

import pytest
import torch

from shoal.torch_support.copying import copy

LONG, SHORT = 1 << 20, 8


@pytest.mark.parametrize("numel", [SHORT, LONG])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
def test_values_arrive_and_autograd_knows(dtype: torch.dtype, numel: int) -> None:
    target, source = torch.zeros(numel, dtype=dtype), torch.ones(numel, dtype=dtype)
    before = target._version
    copy(target, source)
    assert torch.equal(target, source)
    assert target._version == before + 1


def test_a_value_that_backward_needs_is_missed() -> None:
    """Written by numpy alone, the gradient would be wrong and nobody would say so."""
    weight = torch.ones(LONG, requires_grad=True)
    factor = torch.ones(LONG)
    product = (weight * factor).sum()
    copy(factor, torch.zeros(LONG))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("source", [torch.ones(LONG).double(), torch.ones(LONG, 2)[:, 0]])
def test_other_dtypes_and_strides(source: torch.Tensor) -> None:
    target = torch.zeros(LONG)
    copy(target, source)
    assert torch.equal(target, torch.ones(LONG))


def test_conjugates() -> None:
    source = torch.randn(LONG, dtype=torch.complex64)
    target = torch.zeros_like(source)
    copy(target, source.conj())
    assert torch.equal(target, source.conj().resolve_conj())


def test_inference_mode() -> None:
    with torch.inference_mode():
        target = torch.zeros(LONG)
        copy(target, torch.ones(LONG))
        assert target.sum() == LONG

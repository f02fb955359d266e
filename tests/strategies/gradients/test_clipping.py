"""Clipping sees all gradients, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from strategies.loops import (
    RANKS,
    assert_same_gradients,
    data,
    distinct,
    each,
    full_gradients,
    gradients_of,
    local,
    run,
    seeded,
    wrapped,
)
from strategies.models import Unused


def clip(strategy: str, max_norm: float, norm_type: float) -> tuple[Tensor, dict[str, Any]]:
    model, _ = wrapped(strategy)
    x, y = local(0)
    F.mse_loss(model(x), y).backward()
    return model.clip_grad_norm_(max_norm, norm_type), full_gradients(model)


@each
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_by_norm(strategy: str, norm_type: float, max_norm: float) -> None:
    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    for norm, gradients in run(clip, strategy, max_norm, norm_type):
        assert torch.allclose(norm, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


@each
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_without_a_finite_norm_are_an_error_on_request(
    strategy: str, norm_type: float
) -> None:
    def clip_nothing() -> dict[str, Any]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        (F.mse_loss(model(x), y) * (float("inf") if shoal.world().rank else 1.0)).backward()
        before = full_gradients(model)
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            model.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        after = full_gradients(model)
        return {name: (before[name], after[name]) for name in before}

    for gradients in run(clip_nothing):
        for before, after in gradients.values():
            assert torch.allclose(before, after, equal_nan=True)


@each
def test_clipping_by_value(strategy: str) -> None:
    def clip_value() -> dict[str, Any]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        model.clip_grad_value_(0.01)
        return full_gradients(model)

    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    for gradients in run(clip_value):
        assert_same_gradients(gradients, gradients_of(model))


@distinct
def test_clipping_when_there_are_no_gradients(strategy: str) -> None:
    def clip_nothing() -> float:
        model, _ = wrapped(strategy)
        model.clip_grad_value_(1.0)
        return model.clip_grad_norm_(1.0).item()

    assert run(clip_nothing) == [0.0] * RANKS


@distinct
def test_clipping_ignores_what_nobody_used(strategy: str) -> None:
    def clip_some() -> tuple[Tensor, dict[str, Any]]:
        model, _ = wrapped(strategy, Unused)
        x, y = local(0)
        F.mse_loss(model(x, False), y).backward()
        return model.clip_grad_norm_(0.01), full_gradients(model)

    model = seeded(Unused)
    x, y = data(0)
    F.mse_loss(model(x, False), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for norm, gradients in run(clip_some):
        assert torch.allclose(norm, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


@each
def test_torch_s_own_clipping(strategy: str) -> None:
    def clip_by_torch() -> tuple[Tensor, dict[str, Any]]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01), full_gradients(model)

    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for norm, gradients in run(clip_by_torch):
        assert torch.allclose(norm, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


def clip_parts_of_different_dtypes(strategy: str) -> float:
    """Whole parameters are shared out, so some ranks hold single precision only, or nothing."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2).double()})
    optimizer = torch.optim.Adafactor(module.parameters())
    model, optimizer = shoal.as_distributed(module, optimizer, strategy=strategy)
    module["b"](module["a"](torch.ones(2, 3)).double()).sum().backward()
    return model.clip_grad_norm_(0.1).item()


@distinct
def test_ranks_that_hold_other_dtypes(strategy: str) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2).double()})
    module["b"](module["a"](torch.ones(2, 3)).double()).sum().backward()
    gradients = [p.grad.double().flatten() for p in module.parameters()]
    expected = torch.cat(gradients).norm().item()
    for norm in run(clip_parts_of_different_dtypes, strategy, ranks=5):
        assert norm == pytest.approx(expected, rel=1e-6)

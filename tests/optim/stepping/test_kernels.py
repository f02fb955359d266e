"""Steps take the fused kernel where the user left the choice, and nobody can tell afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import shoal
from shoal.optim.state import cut_state
from shoal.optim.stepping.kernels import fused_where_free


class _OwnAdamW(AdamW):
    """A subclass may compute anything."""


def _parameter(dtype: torch.dtype = torch.float32, numel: int = 37) -> nn.Parameter:
    parameter = nn.Parameter(torch.linspace(-1, 1, numel, dtype=dtype))
    parameter.grad = torch.linspace(-2, 3, numel, dtype=dtype)
    return parameter


def _inside(optimizer: Optimizer) -> Any:
    with fused_where_free(optimizer):
        return optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("make", [Adam, AdamW, Adagrad])
def test_default_is_fused_inside_and_as_before_outside(make: Callable[..., Optimizer]) -> None:
    optimizer = make([_parameter()], lr=0.1)
    before = optimizer.state_dict()["param_groups"]
    assert _inside(optimizer) is True
    assert optimizer.state_dict()["param_groups"] == before


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW([_parameter()], fused=False),
        AdamW([_parameter()], foreach=False),
        AdamW([_parameter()], foreach=True),
        SGD([_parameter()], momentum=0.9),
        _OwnAdamW([_parameter()]),
        AdamW([_parameter(torch.bfloat16)]),
        AdamW([_parameter()], lr=torch.tensor(0.1)),
        AdamW([_parameter()], differentiable=True),
    ],
)
def test_choice_of_the_user_stands(optimizer: Optimizer) -> None:
    before = optimizer.param_groups[0]["fused"]
    assert _inside(optimizer) is before


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.Adadelta([_parameter()])
    with fused_where_free(optimizer):
        assert "fused" not in optimizer.param_groups[0]


def test_steps_that_are_counted_in_float64_go_on_as_they_began() -> None:
    parameter = _parameter()
    optimizer = AdamW([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(3.0, dtype=torch.float64),
        "exp_avg": torch.zeros(37),
        "exp_avg_sq": torch.ones(37),
    }
    with fused_where_free(optimizer):
        optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 4


def test_option_is_restored_when_a_step_raises() -> None:
    optimizer = AdamW([_parameter()])
    with pytest.raises(RuntimeError, match="mine"), fused_where_free(optimizer):
        raise RuntimeError("mine")
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamW, {"amsgrad": True, "maximize": True}),
        (Adam, {"weight_decay": 0.1}),
        (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ],
)
def test_both_kernels_agree(
    make: Callable[..., Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    plain, fused = _parameter(dtype), _parameter(dtype)
    one, other = make([plain], lr=0.1, **options), make([fused], lr=0.1, **options)
    for _ in range(5):
        one.step()
        with fused_where_free(other):
            other.step()
    torch.testing.assert_close(fused, plain, rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_wrapped_optimizer_steps_fused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **k: (calls.append(1), plain(*a, **k)))

    def train() -> Any:
        model = nn.Linear(64, 64)
        wrapped, optimizer = shoal.as_distributed(
            model, AdamW(model.parameters()), strategy=strategy
        )
        wrapped(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()["param_groups"][0]["fused"]

    assert shoal.run(train, ranks=2, backend="memory") == [None, None]
    assert len(calls) == 2


def test_a_hook_may_choose_inside_a_step() -> None:
    optimizer = AdamW([_parameter()])
    with fused_where_free(optimizer):
        optimizer.param_groups[0]["fused"] = False
    assert optimizer.param_groups[0]["fused"] is False


def test_state_is_cut_without_a_copy() -> None:
    """It may be all there is of it, and twice that may be more than there is room for."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.arange(5.0)}
    first, second = (cut_state(state, torch.zeros(5), *bounds) for bounds in ((0, 2), (2, 5)))
    assert second["exp_avg"].tolist() == [2, 3, 4]
    assert first["exp_avg"].data_ptr() == state["exp_avg"].data_ptr()
    assert first["step"] is not second["step"]


def _num_stepped(make: Callable[..., Optimizer]) -> int:
    model = nn.Linear(512, 512, bias=False)
    _, optimizer = shoal.as_distributed(model, make(model.parameters()), strategy="ddp")
    return len(list(optimizer.division.segments))


def test_only_what_takes_several_passes_is_cut_to_fit_the_cache() -> None:
    """One long tensor is stepped, copied and saved faster than many short ones."""
    assert shoal.run(_num_stepped, 2, "memory", args=(AdamW,)) == [1, 1]
    loop = partial(AdamW, fused=False)
    assert min(shoal.run(_num_stepped, 2, "memory", args=(loop,))) > 1

"""`state_dict` of a wrapped optimizer is the plain optimizer's, and either loads the other's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pools
import shoal
from strategies.loops import assert_same, data, each, local, one_step, run, seeded, whole_state

STEPS = 3
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-3, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, eps=1e-3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}
named = pytest.mark.parametrize("name", OPTIMIZERS)


class WithScalar(nn.Module):
    """Also a parameter without dimensions, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def build(name: str) -> Any:
    module = seeded(WithScalar)
    weights = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = OPTIMIZERS[name]([{"params": weights, "weight_decay": 0.1}, {"params": others}])
    return module, optimizer


def wrap(name: str, strategy: str, **options: Any) -> Any:
    module, optimizer = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shoal.as_distributed(
            module, optimizer, strategy=strategy, min_group_bytes=100, **options
        )


def one_process(name: str, steps: range, saved: Any = None) -> Any:
    module, optimizer = build(name)
    if saved is not None:
        module.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch goes on with what it is given
    for step in steps:
        one_step(module, optimizer, data(step))
    return whole_state(module), optimizer.state_dict()


def ranks_train(name: str, strategy: str, steps: range, saved: Any = None) -> Any:
    model, optimizer = wrap(name, strategy)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        one_step(model, optimizer, local(step))
    return model.state_dict(), optimizer.state_dict()


def assert_same_optimizer(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for key, value in state.items():
            other = found["state"][number][key]
            assert other.shape == value.shape, (number, key)
            assert torch.allclose(other, value, rtol=0, atol=1e-9), (number, key)


@each
@named
def test_it_is_the_plain_optimizers(strategy: str, name: str) -> None:
    parameters, expected = one_process(name, range(STEPS))
    for state, found in run(ranks_train, name, strategy, range(STEPS)):
        assert_same(state, parameters, 1e-9)
        assert_same_optimizer(found, expected)


@each
@named
def test_ranks_go_on_where_one_process_stopped(strategy: str, name: str) -> None:
    saved = one_process(name, range(STEPS))
    expected, expected_optimizer = one_process(name, range(STEPS, 2 * STEPS), saved)
    for state, found in run(ranks_train, name, strategy, range(STEPS, 2 * STEPS), saved):
        assert_same(state, expected, 1e-8)
        assert_same_optimizer(found, expected_optimizer)


@pytest.mark.parametrize(
    ("before", "after"), [("zero3", "ddp"), ("ddp", "zero2"), ("zero1", "zero3")]
)
def test_one_strategy_goes_on_where_another_stopped(before: str, after: str) -> None:
    saved = run(ranks_train, "adamw", before, range(STEPS), ranks=2)[0]
    expected, _ = one_process("adamw", range(2 * STEPS))
    for state, _ in run(ranks_train, "adamw", after, range(STEPS, 2 * STEPS), saved, ranks=3):
        assert_same(state, expected, 1e-9)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_over_shared_memory(strategy: str) -> None:
    _, expected = one_process("adamw", range(STEPS))
    for _, found in pools.Team("shm", 2).run(ranks_train, "adamw", strategy, range(STEPS)):
        assert_same_optimizer(found, expected)


def call_hooks_after_loading() -> int:
    model, optimizer = wrap("adamw", "zero2")
    calls: list[int] = []
    optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    one_step(model, optimizer, local(0))
    optimizer.load_state_dict(optimizer.state_dict())
    one_step(model, optimizer, local(1))
    return len(calls)


def test_hooks_of_the_optimizer_are_called_once_a_step() -> None:
    assert run(call_hooks_after_loading) == [2, 2, 2]


def load_another_models() -> None:
    _, optimizer = wrap("adamw", "zero2")
    saved = torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict()
    optimizer.load_state_dict(saved)


def test_a_state_for_other_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters; this optimizer has groups"):
        run(load_another_models)

"""Gradients of which each rank holds a part are used like any others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pools
import shoal
from strategies.gradient_idioms import IDIOMS, Loss
from strategies.loops import assert_same, data, each, local, momentum, run, seeded, whole_state

Idiom = Callable[[Any, Any, Loss], list[Tensor]]
idioms = pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)


def alone(idiom: Idiom) -> Any:
    model = seeded()

    def loss(step: int) -> Tensor:
        x, y = data(step, items=12)
        return F.mse_loss(model(x), y)

    return idiom(model, momentum(model), loss), whole_state(model)


def on_ranks(idiom: Idiom, strategy: str, options: dict[str, Any]) -> Any:
    module = seeded()
    model, optimizer = shoal.as_distributed(
        module, momentum(module), strategy=strategy, min_group_bytes=300, **options
    )

    def loss(step: int) -> Tensor:
        x, y = local(step, items=12)
        return F.mse_loss(model(x), y)

    return idiom(model, optimizer, loss), model.state_dict()


def assert_equal(found: Any, expected: Any) -> None:
    (seen, state), (numbers, weights) = found, expected
    assert len(seen) == len(numbers)
    for place, (value, number) in enumerate(zip(seen, numbers, strict=True)):
        assert torch.allclose(value, number, rtol=1e-6, atol=1e-9), place
    assert_same(state, weights, 1e-9)


@each
@idioms
def test_idioms(idiom: Idiom, strategy: str) -> None:
    expected = alone(idiom)
    for found in run(on_ranks, idiom, strategy, {}):
        assert_equal(found, expected)


@idioms
def test_idioms_with_replicas(idiom: Idiom) -> None:
    expected = alone(idiom)
    for found in run(on_ranks, idiom, "fsdp", {"replica": 2}, ranks=4):
        assert_equal(found, expected)


def all_idioms(strategy: str) -> list[Any]:
    found = [on_ranks(idiom, strategy, {}) for idiom in IDIOMS]
    gc.collect()  # models hold groups, and they connections
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "team", [pools.Team("shm", 2), pools.Team("gloo", 2), pools.Team("shm", 3)]
)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_idioms_between_processes(team: pools.Team, strategy: str) -> None:
    expected = [alone(idiom) for idiom in IDIOMS]
    for found in team.run(all_idioms, strategy):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)

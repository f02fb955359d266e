"""Weights that are changed by hand, the same way over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from strategies.idioms import IDIOMS, Batch, Wrap, clip_parameters
from strategies.loops import assert_same, data, each, local, momentum, whole_state

TEAMS = [("memory", 3), ("shm", 2), ("shm", 3), ("gloo", 2)]
everywhere = pytest.mark.parametrize("team", [pools.Team(*team) for team in TEAMS], ids=str)
ITEMS = 12


def alone(module: nn.Module) -> tuple[Any, Any]:
    return module, momentum(module)


def in_several_groups(strategy: str) -> Wrap:
    def wrap(module: nn.Module) -> tuple[Any, Any]:
        optimizer = momentum(module)
        return shoal.as_distributed(module, optimizer, strategy=strategy, min_group_bytes=300)

    return wrap


def all_idioms(wrap: Wrap, batch: Batch) -> dict[str, Any]:
    return {idiom.__name__: idiom(wrap, batch) for idiom in IDIOMS}


def on_ranks(strategy: str) -> dict[str, Any]:
    return all_idioms(in_several_groups(strategy), lambda step: local(step, items=ITEMS))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return all_idioms(alone, lambda step: data(step, items=ITEMS))


@everywhere
@each
def test_idioms_equal_one_process(
    strategy: str, team: pools.Team, expected: dict[str, Any]
) -> None:
    for found in team.run(on_ranks, strategy):
        differences = {
            f"{idiom}: {name}": (value - expected[idiom][name]).abs().max().item()
            for idiom, values in found.items()
            for name, value in values.items()
        }
        assert {name: value for name, value in differences.items() if not value < 1e-10} == {}


# Where a parameter is a part of one, what is done to each element alone makes sense.

MESHES = {
    "tensor": {"tensor": 2, "data": 2, "zero": 3},
    "pipeline": {"pipeline": 2, "data": 2, "zero": 3},
    "hybrid": {"tensor": 2, "pipeline": 2, "data": 1},
}


class Block(nn.Module):
    """What is split over ranks: a wide layer between two narrow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train_blocks(wrap: Wrap, num_parts: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, optimizer = wrap(nn.Sequential(Block(), Block()).double())
    part = model.data_group.rank if num_parts > 1 else 0
    for step in range(3):
        x = data(step, items=ITEMS)[0].chunk(num_parts)[part]
        optimizer.zero_grad()
        if isinstance(model, nn.Sequential):
            F.mse_loss(model(x), 2 * x).backward()
        else:
            model.train_step(x, 2 * x, F.mse_loss)
        clip_parameters(model, 0.3)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data = 0.9 * parameter.data
    return whole_state(model)


def blocks_on_ranks(strategy: str) -> dict[str, Tensor]:
    def wrap(module: nn.Module) -> tuple[Any, Any]:
        mesh = MESHES[strategy]
        return shoal.as_distributed(module, momentum(module), strategy=strategy, **mesh)

    return train_blocks(wrap, MESHES[strategy]["data"])


@pytest.mark.parametrize("backend", ["memory", "shm"])
@pytest.mark.parametrize("strategy", MESHES)
def test_parts_of_parameters_may_be_changed(strategy: str, backend: str) -> None:
    expected = train_blocks(alone, 1)
    for state in pools.Team(backend, 4).run(blocks_on_ranks, strategy):
        assert_same(state, expected)

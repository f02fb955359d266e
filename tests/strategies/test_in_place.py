"""Weights that are changed by hand, the same way over every transport."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import pools
import shoal
from strategies.idioms import IDIOMS, Batch, Wrap
from strategies.loops import data, each, local, momentum

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

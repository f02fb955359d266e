"""``optimizer.state`` by the user's parameters: their state, or an error in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ShoalError


def step(strategy: str, make: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    wanted = list(module.parameters())
    model, optimizer = shoal.as_distributed(
        module, make(module.parameters()), strategy=strategy, **options
    )
    assert wanted[0] not in optimizer.division.segments.states
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return wanted, optimizer


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_rank_that_has_all_of_it_shows_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare() -> None:
        parameters, optimizer = step("ddp", make)
        whole = optimizer.state_dict()["state"]
        for number, parameter in enumerate(parameters):
            found = optimizer.state[parameter]
            assert found.keys() == whole[number].keys()
            for key, value in whole[number].items():
                assert torch.equal(found[key], value), key
            assert parameter in optimizer.state

    shoal.run(compare, 2, "memory")
    monkeypatch.setattr("shoal.optim.division.segmentation._CACHED_BYTES", 16)
    monkeypatch.setattr("shoal.optim.stepping.kernels._HAVE_FUSED", ())
    shoal.run(compare, 2, "memory")


def test_before_a_step_there_is_none() -> None:
    def look() -> Any:
        module = nn.Linear(2, 2)
        _, optimizer = shoal.as_distributed(module, torch.optim.SGD(module.parameters()))
        return dict(optimizer.state[module.weight]), len(optimizer.state)

    assert shoal.run(look, 1, "memory") == [({}, 0)]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_rank_that_has_a_part_says_so(strategy: str) -> None:
    def look() -> None:
        parameters, optimizer = step(strategy, torch.optim.AdamW, min_group_bytes=1 << 20)
        for parameter in parameters:
            optimizer.state[parameter]

    with pytest.raises(ShoalError, match=r"has [01] of the 35? elements .*state_dict\(\)"):
        shoal.run(look, 2, "memory")


def test_it_is_to_read_only() -> None:
    def write() -> None:
        parameters, optimizer = step("ddp", torch.optim.AdamW)
        optimizer.state[parameters[0]] = {}

    def look_up_another() -> None:
        _, optimizer = step("ddp", torch.optim.AdamW)
        optimizer.state[nn.Parameter(torch.zeros(1))]

    with pytest.raises(ShoalError, match="load_state_dict"):
        shoal.run(write, 1, "memory")
    with pytest.raises(KeyError, match="no parameter of this optimizer"):
        shoal.run(look_up_another, 1, "memory")

"""Writes to what backward still needs: an error, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shoal
from pools import Team

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
TEAMS = [Team("memory", 3), Team("shm", 2), Team("gloo", 2)]


class Careless(nn.Module):
    """Writes to the output of a sigmoid, whose backward needs that output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(inputs))
        hidden.mul_(2)
        return self.second(hidden)


def write_in_forward(strategy: str) -> None:
    model = shoal.as_distributed(Careless(), strategy=strategy)
    loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def write_after_forward(strategy: str) -> None:
    model = shoal.as_distributed(nn.Linear(4, 4), strategy=strategy)
    hidden = torch.ones(3, 4, requires_grad=True) * 2
    loss = model(hidden).sum()
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def counters_in_between(strategy: str) -> None:
    """Backward does not need the buffers of batch normalization, which a second call writes to."""
    model = shoal.as_distributed(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), strategy=strategy
    )
    inputs = torch.randn(6, 4)
    (model(inputs).square().mean() + model(inputs + 1).square().mean()).backward()


@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("deed", [write_in_forward, write_after_forward, counters_in_between])
def test_writes_to_what_backward_needs(deed: object, strategy: str, team: Team) -> None:
    team.run(deed, strategy)

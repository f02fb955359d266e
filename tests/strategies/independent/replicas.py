"""A model, its data and its steps for tests of replicas that are trained apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

RANKS = 3
State = dict[str, Tensor]


def build() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


class Tied(nn.Module):
    """One weight under two names, and one that belongs to no layer: in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(5, 3, bias=False)
        self.between = nn.Linear(3, 3)
        self.last = nn.Linear(5, 3, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """The shared weight has two uses."""
        return self.between(self.first(inputs)) * self.scale + self.last(inputs)


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Another batch on each rank in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def train(model: Any, optimizer: Any, steps: range) -> None:
    """What users write."""
    for step in steps:
        inputs, targets = data(step, shoal.world().rank)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def on_ranks(fn: Any, ranks: int = RANKS, *args: Any) -> list[Any]:
    """Ranks are threads, so that events come in one order."""
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def assert_equal(found: State, expected: State) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name

"""Backward in two halves gives the gradients of one backward, and does no work twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.strategies.pipeline.split_backward import SplitBackward
from strategies.models import Block


class Shared(nn.Module):
    """A weight that comes in twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Aside(nn.Module):
    """A weight on its own way, and an input that nothing is learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * torch.exp(self.weight).cumsum(0) + self.weight.sum()


MODULES = {
    "block": lambda: Block(6, 2),
    "shared": Shared,
    "aside": Aside,
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)),
    "frozen": lambda: nn.Linear(6, 6).requires_grad_(False),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("has_input", [True, False])
def test_equals_one_backward(name, has_input) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    other = copy.deepcopy(module)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=has_input)
    y = x.detach().clone().requires_grad_(has_input)
    out = module(x)
    if not out.requires_grad:
        return
    gradient = torch.randn_like(out)
    out.backward(gradient)
    halves = SplitBackward([other(y)], [gradient], [y])
    halves.to_inputs()
    assert (y.grad is not None) == has_input
    halves.to_weights()
    torch.testing.assert_close(y.grad, x.grad)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)


def test_weights_wait_for_the_second_half() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    halves = SplitBackward([layer(x).sum()], [None], [x])
    halves.to_inputs()
    assert x.grad is not None
    assert layer.weight.grad is None
    halves.to_weights()
    assert layer.weight.grad is not None


def test_no_matrix_product_is_done_twice() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)
    halves = SplitBackward([layers(x)], [torch.ones(4, 8)], [x])
    with torch.profiler.profile(acc_events=True) as first:
        halves.to_inputs()
    with torch.profiler.profile(acc_events=True) as second:
        halves.to_weights()
    assert _products(first) == 3
    assert _products(second) == 3


def _products(profile) -> int:
    return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")

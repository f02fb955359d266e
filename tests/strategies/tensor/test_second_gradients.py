"""Gradients of gradients through split layers: a penalty on how steep a model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from strategies.tensor.tasks import FeedForward, JointGate, NormedInside

WIDTH = 6


class Steep(nn.Module):
    """Blocks that are split in pairs, with a parameter in between, or layer by layer."""

    def __init__(self, *, is_stack: bool) -> None:
        super().__init__()
        kind = JointGate if is_stack else NormedInside
        self.blocks = nn.ModuleList([FeedForward(WIDTH, 9), kind(WIDTH, 9)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x)


def steepness(is_split: bool, **options: Any) -> dict[str, Tensor | None]:
    """Gradients of a loss with a penalty on the gradient of the inputs."""
    torch.manual_seed(0)
    plain = Steep(is_stack="sequence_parallel" in options).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    model: Any = shoal.as_distributed(plain, strategy="tensor", **options) if is_split else plain
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    (slope.pow(2).sum() + outputs.pow(2).sum()).backward()
    if is_split:
        return dict(model.full_gradients())
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"tensor": 3, "zero": 3}])
def test_gradients_of_gradients_are_those_of_one_process(options: dict[str, Any]) -> None:
    def on_ranks() -> dict[str, Tensor | None]:
        return steepness(True, **options)

    expected = steepness(False, **options)
    for found in shoal.run(on_ranks, 3, "memory", timeout=40):
        torch.testing.assert_close(found, expected)

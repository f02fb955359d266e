"""Layers that sleep instead of computing: four stages fit on two cores, and costs are known."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Input(torch.autograd.Function):
    """The identity; forward and backward take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Remembers how long."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Takes its time."""
        time.sleep(ctx.seconds)
        return gradient, None


class _Weight(torch.autograd.Function):
    """The identity; its backward takes its time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        """Remembers how long."""
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Takes its time."""
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """Sleeps as long for forward as for the gradient of its input and for that of its weight."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` for each of the three."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Adds the weight."""
        return _Input.apply(x, self.seconds) + _Weight.apply(self.weight, self.seconds)

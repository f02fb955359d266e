"""A model and its steps for checkpoints of replicas that are trained apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

State = dict[str, Tensor]


def made(strategy: str, **options: Any) -> tuple[Any, Any]:
    """A wrapped model with buffers that learn, and its optimizer."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return shoal.as_distributed(module, optimizer, strategy=strategy, **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    """Another batch on each rank in each step."""
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + shoal.world().rank)
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=generator)
        F.mse_loss(model(inputs), inputs[:, :3]).backward()
        optimizer.step()


def run(fn: Any, ranks: int, *args: Any) -> list[Any]:
    """Ranks are threads."""
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)

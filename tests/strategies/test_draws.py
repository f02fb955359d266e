"""Optimizers that draw random numbers, between processes whose generators differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pools
import shoal


def _train(strategy: str) -> dict[str, Any]:
    class Langevin(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.05) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])

    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model, optimizer = shoal.as_distributed(
        module, Langevin(module.parameters()), strategy=strategy
    )
    torch.manual_seed(100 + shoal.world().rank)
    for _ in range(3):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_processes_draw_what_threads_draw(strategy: str, backend: str) -> None:
    (expected, _) = shoal.run(_train, 2, "memory", args=("ddp",))
    for state in pools.Team(backend, 2).run(_train, strategy):
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)

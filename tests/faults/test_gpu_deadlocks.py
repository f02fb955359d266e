"""Deadlocks of ranks that train on a GPU: hooks run in threads of torch's own there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from faults.worlds import outcomes, site_of
from gpus import over_nccl, own_device
from shoal.comm.control.deadlock import watch
from shoal.errors import DeadlockError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKENDS = ["gloo", pytest.param("nccl", marks=over_nccl(2))]


def train_and_save_on_one_rank(strategy: str, folder: str) -> None:
    world, device = shoal.world(), own_device()
    plain: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    adam = torch.optim.AdamW(plain.parameters())
    model, optimizer = shoal.as_distributed(plain, adam, strategy=strategy)
    for step in range(3):
        loss = model(torch.randn(4, 8, device=device) + world.rank).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and world.rank == 0:
            shoal.save(folder, model, optimizer)  # alone


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_of_one_rank(backend: str, strategy: str, tmp_path: Path) -> None:
    run = train_and_save_on_one_rank
    results = outcomes(run, strategy, str(tmp_path), backend=backend, ranks=2)
    for outcome in results:
        assert isinstance(outcome.error, DeadlockError), outcome.traceback
        text = str(outcome.error)
        assert f"rank 0 in shoal.save() at {site_of(run, '# alone')}" in text
        assert "rank 1 in loss.backward() at " in text or "rank 1 in model.forward() at " in text


class Busy(torch.autograd.Function):
    """A backward on the CPU that takes its time, in the main thread."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if shoal.world().rank == 1:
            product = torch.ones(600, 600)
            for _ in range(400):
                product = product @ product / 600
        return gradient.clone()


def compute_in_backward() -> int:
    watch.LONG_S = watch.CERTAIN_S = 0.1
    plain: Any = nn.Linear(8, 8).cuda()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(plain, sgd, strategy="ddp")
    for _ in range(2):
        inputs = torch.randn(4, 8, requires_grad=True)
        loss = model(Busy.apply(inputs + shoal.world().rank).cuda()).square().mean()
        loss.backward()
        optimizer.step()
    return 1


def test_a_backward_that_computes_is_no_deadlock() -> None:
    results = outcomes(compute_in_backward, backend="gloo", ranks=2)
    assert [outcome.value for outcome in results] == [1, 1], results[0].traceback

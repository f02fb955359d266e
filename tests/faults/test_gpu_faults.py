"""Ranks that fail, leave, die or stop while others train over NCCL, and calls that do not fit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from faults.worlds import SOON_S, assert_all_blame, kill, outcomes, site_of, timed, values
from gpus import over_nccl, own_device
from shoal.errors import MismatchError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

each_size = pytest.mark.parametrize("ranks", [pytest.param(n, marks=over_nccl(n)) for n in (2, 3)])


def fail() -> None:
    raise RuntimeError("no luck")


def leave() -> None:
    sys.exit(3)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    kill(os.getpid())


FAULTS: dict[str, tuple[Callable[[], None] | None, str]] = {
    "raise": (fail, "no luck"),
    "return": (None, "left"),
    "exit": (leave, "3"),
    "kill": (die, "died"),
    "stop": (stop, "stopped"),
}


def train_until(fault: Callable[[], None] | None, strategy: str) -> None:
    world, device = shoal.world(), own_device()
    plain: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    adam = torch.optim.AdamW(plain.parameters())
    model, optimizer = shoal.as_distributed(plain, adam, strategy=strategy)
    with timed():
        for step in range(200):
            if step == 5 and world.rank == 1:
                if fault is None:
                    return
                fault()
            model(torch.randn(4, 64, device=device) + world.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@each_size
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(fault: str, strategy: str, ranks: int) -> None:
    do, word = FAULTS[fault]
    results = outcomes(train_until, do, strategy, backend="nccl", ranks=ranks)
    assert_all_blame(results, 1, word)
    assert all(each.error.seconds < SOON_S for each in results if each.rank != 1)


def mismatched_sizes(times: int, site: str) -> list[float]:
    world, device = shoal.world(), own_device()
    for _ in range(times):
        data = torch.ones(1000 + 7 * world.rank, device=device)
        with pytest.raises(MismatchError, match="rank 1") as caught:
            world.all_reduce(data)  # not alike
        assert site in str(caught.value)
        work = world.all_reduce(data, async_op=True)
        with pytest.raises(MismatchError, match="rank 1"):
            work.wait()
    return world.all_reduce(torch.ones(2, device=device)).tolist()


@each_size
def test_sizes_that_do_not_fit(ranks: int) -> None:
    site = site_of(mismatched_sizes, "# not alike")
    results = outcomes(mismatched_sizes, 20, site, backend="nccl", ranks=ranks)
    assert values(results) == [[float(ranks)] * 2] * ranks

"""Ranks that train on the same batches are warned of it, once, and others are not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pools
import shoal


def train(case: str, strategy: str = "ddp", options: dict | None = None) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = shoal.as_distributed(
        module, torch.optim.SGD(module.parameters(), lr=0.1), strategy=strategy, **(options or {})
    )
    rank = model.data_group.rank
    for step in range(5):
        torch.manual_seed(step)
        if case == "different" or (case == "different later" and step == 2):
            torch.manual_seed(100 * step + rank)
        inputs, targets = torch.randn(4, 4), torch.randn(4, 2)
        if case == "evaluation":
            with torch.no_grad():
                model(inputs)
            inputs += rank
        if case == "accumulation":
            with model.no_sync():
                F.mse_loss(model(inputs + step), targets).backward()
        model.train_step(inputs, targets, F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()


def train_often() -> None:
    """Ranks call the model differently often before they average."""
    module = nn.Linear(4, 2)
    model, optimizer = shoal.as_distributed(
        module, torch.optim.SGD(module.parameters(), lr=0.1), strategy="ddp"
    )
    for _ in range(4):
        sum(model(torch.ones(4, 4)).sum() for _ in range(1 + shoal.world().rank)).backward()
        optimizer.step()


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in found if "identical inputs" in str(each.message)]


def catch(fn, *args) -> list[str]:
    with caught() as texts:
        fn(*args)
    return texts


def warned_of(backend: str, ranks: int, fn, *args) -> list[str]:
    """What all ranks are warned of. Threads share where warnings go, so they are caught outside."""
    team = pools.Team(backend, ranks)
    if backend == "memory":
        return catch(team.run, fn, *args)
    return list(chain.from_iterable(team.run(catch, fn, *args)))


STRATEGIES = [
    ("ddp", {}, 2), ("zero2", {}, 3), ("zero3", {}, 2), ("fsdp", {"replica": 2}, 4),
    ("tensor", {"tensor": 2}, 4), ("pipeline", {"data": 2, "micro_batches": 2}, 4),
    ("hybrid", {"pipeline": 2, "micro_batches": 2}, 4),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "options", "ranks"), STRATEGIES)
def test_identical_batches_are_warned_of(strategy, options, ranks) -> None:
    found = warned_of("memory", ranks, train, "identical", strategy, options)
    num_groups = {"fsdp": 1, "ddp": 1, "zero2": 1, "zero3": 1}.get(strategy, 2)
    assert len(found) == num_groups  # each stage has a first rank
    assert all("shoal.as_distributed(model, optimizer, loader)" in text for text in found)
    assert not warned_of("memory", ranks, train, "different", strategy, options)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_between_processes(backend) -> None:
    for strategy in ("ddp", "zero3"):
        assert len(warned_of(backend, 2, train, "identical", strategy)) == 1
        assert not warned_of(backend, 2, train, "different", strategy)
    assert not warned_of(backend, 2, train, "different later")
    assert not warned_of(backend, 2, train_often)


@pytest.mark.parametrize("case", ["different later", "evaluation"])
def test_what_is_not_warned_of(case) -> None:
    assert not warned_of("memory", 2, train, case)
    assert not warned_of("memory", 3, train_often)


def test_identical_with_accumulation() -> None:
    assert len(warned_of("memory", 2, train, "accumulation")) == 1


def test_ranks_that_should_see_the_same() -> None:
    """One rank alone, and ranks that hold parts of one replica."""
    assert not warned_of("memory", 1, train, "identical")
    assert not warned_of("memory", 2, train, "identical", "tensor")


def test_verify_does_not_warn() -> None:
    """Its batches may well be constant."""

    def build():
        model = nn.Linear(3, 2)
        batches = [(torch.ones(4, 3), torch.ones(4, 2))]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, F.mse_loss

    assert not catch(shoal.verify, build)


def test_it_costs_nothing_after_the_first_steps() -> None:
    def look() -> tuple[int, int]:
        torch.manual_seed(shoal.world().rank)
        module = nn.Linear(4, 2)
        model, optimizer = shoal.as_distributed(
            module, torch.optim.SGD(module.parameters(), lr=0.1), strategy="ddp", check_every=0
        )
        calls = []
        for _ in range(3):
            before = sum(each.calls for each in shoal.world().stats().values())
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            after = sum(each.calls for each in shoal.world().stats().values())
            calls.append(after - before)
        return calls[1], calls[2]

    for second, third in pools.Team("memory", 2).run(look):
        assert second == third

"""Ranks over memory that are lost at a chosen operation, and a training that can be compared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.memory.backend import InMemoryBackend

NUM_SAMPLES, BATCH, EPOCHS = 16, 8, 2
NUM_STEPS = EPOCHS * NUM_SAMPLES // BATCH


noted: list[tuple[Any, ...]] = []
"""What ranks that are threads have done, in its order; arguments are copied for each of them."""


class Lost(Exception):
    """What a rank is lost by."""


@dataclass
class Fuse:
    """Ends a rank at its n-th operation from now on; -1 for never."""

    left: int = -1
    count: int = 0

    def burn(self) -> None:
        self.count += 1
        self.left -= 1
        if self.left == 0:
            raise Lost


def install(monkeypatch: Any) -> None:
    """From now on each operation of a rank that has a fuse burns it."""
    arrive = InMemoryBackend._arrive

    def burning(self: Any, *args: Any) -> Any:
        fuse = getattr(threading.current_thread(), "fuse", None)
        if fuse is not None:
            fuse.burn()
        return arrive(self, *args)

    monkeypatch.setattr(InMemoryBackend, "_arrive", burning)


def light(n: int) -> Fuse:
    """This rank has a fuse."""
    fuse = Fuse(n)
    threading.current_thread().fuse = fuse  # type: ignore[attr-defined]
    return fuse


@dataclass
class Result:
    """What became of a training on one rank."""

    parameters: dict[str, torch.Tensor]
    state: dict[str, Any]
    lr: float
    num_committed: int
    samples: list[tuple[int, list[int]]]
    changes: list[Any]
    num_operations: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)


def make_module(dropout: float) -> nn.Sequential:
    """Odd sizes, dropout, a tied and a frozen parameter."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(dropout), nn.Linear(5, 5), nn.Linear(5, 5))
    model[3].weight = model[2].weight
    model[3].bias.requires_grad_(False)
    return model


def make_training(
    strategy: str,
    make_optimizer: Callable[..., Any] = torch.optim.Adam,
    dropout: float = 0.4,
    make_module: Callable[[float], Any] = make_module,
    seed: int | None = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """Two groups of parameters; samples in an order that depends on nothing else with a seed."""
    torch.manual_seed(5)
    model: Any = make_module(dropout)
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}]
    optimizer = make_optimizer(groups, lr=0.1)
    numbers = torch.arange(NUM_SAMPLES)
    inputs = torch.sin(numbers.view(-1, 1) * torch.tensor([1.0, 2.0, 3.0]))
    order = None if seed is None else torch.Generator().manual_seed(seed)
    data = TensorDataset(inputs, numbers)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True, generator=order)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy=strategy, elastic=True, min_group_bytes=64, **options
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    optimizer.also.append(scheduler)
    return model, optimizer, loader, scheduler


def loss_of(output: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, numbers.float().sin().view(-1, 1).expand(-1, 5))


def train(
    strategy: str,
    victim: int | tuple[int, ...] | None = None,
    at_step: int = 1,
    nth: int = -1,
    second: tuple[int, int] | None = None,
    options: dict[str, Any] | None = None,
) -> Result:
    """Trains; the rank that began as ``victim`` is lost at its n-th operation after a step, or all.

    ``second``: another rank, and its n-th operation once the first is lost.
    """
    first_rank = shoal.world().rank
    is_new = shoal.world().membership is not None and shoal.world().membership.generation == 0
    model, optimizer, loader, scheduler = make_training(strategy, **(options or {}))
    result = Result({}, {}, 0.0, 0, [], [])
    optimizer._on_change = result.changes.append
    fuse = None
    for epoch in loader.epochs(EPOCHS):
        for inputs, numbers in loader:
            with optimizer.attempt():
                loss = model.train_step(inputs, numbers, loss_of)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                result.losses.append((optimizer.num_committed, float(loss)))
                result.samples.append((optimizer.num_committed, numbers.tolist()))
            if optimizer.num_committed == at_step and fuse is None and not is_new:
                if first_rank in (victim if isinstance(victim, tuple) else (victim,)):
                    fuse = light(nth)
                elif second is not None and first_rank == second[0]:
                    fuse = _LaterFuse.light(*second)
        del epoch
    result.num_operations = 0 if fuse is None else fuse.count
    light(-1)
    result.parameters = {name: value.clone() for name, value in model.state_dict().items()}
    result.state = optimizer.state_dict()
    result.lr = optimizer.param_groups[0]["lr"]
    result.num_committed = optimizer.num_committed
    return result


class _LaterFuse(Fuse):
    """Burns in later worlds only."""

    @classmethod
    def light(cls, rank: int, n: int) -> Fuse:
        fuse = cls(n)
        threading.current_thread().fuse = fuse  # type: ignore[attr-defined]
        return fuse

    def burn(self) -> None:
        membership = shoal.world().membership
        if membership is not None and membership.generation > 1:
            super().burn()


def same(left: Any, right: Any) -> bool:
    """Whether two nested values are the same, bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)

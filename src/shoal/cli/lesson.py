"""What the ranks of `shoal demo` do: train, and measure what it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.api import as_distributed
from shoal.cli.gpt import GPT, Shape, batch, loss_fn
from shoal.comm.partition import offsets, split_sizes
from shoal.comm.world import current

# The first steps learn the order of things and warm up memory.
_WARM_UP = 2

Tell = Callable[[int, float], None]


@dataclass
class Learned:
    """What a rank brings back.

    Attributes:
        losses: By step.
        seconds: A step's, the median.
        parameters: The trained ones by name; only on rank 0.
        held: Bytes of parameters, gradients and optimizer state that this rank holds in a step.
        moved: Bytes that this rank gave or got in a step, on average.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    parameters: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    moved: float = 0.0


def make(shape: Shape) -> tuple[GPT, torch.optim.Optimizer]:
    """The same model each time."""
    torch.manual_seed(0)
    model = GPT(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def learn_alone(shape: Shape, num_steps: int, tell: Tell) -> Learned:
    """One process, the plain loop."""
    model, optimizer = make(shape)
    learned, times = Learned(), []
    for step in range(num_steps):
        begin = time.perf_counter()
        tokens, targets = batch(shape, step)
        loss = loss_fn(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        learned.losses.append(loss.item())
        tell(step + 1, learned.losses[-1])
    learned.seconds = statistics.median(times[_WARM_UP:])
    learned.parameters = {name: p.detach() for name, p in model.named_parameters()}
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    learned.held = {"parameters": num_bytes, "gradients": num_bytes, "state": 2 * num_bytes}
    return learned


def learn_together(strategy: str, shape: Shape, num_steps: int, news: str) -> Learned:
    """One rank of many; rank 0 writes each step's loss to the file ``news``."""
    world = current()
    model, optimizer = as_distributed(*make(shape), strategy=strategy)
    learned, times, moved_before = Learned(), [], 0
    for step in range(num_steps):
        if step == _WARM_UP:
            moved_before = _moved(world)
        begin = time.perf_counter()
        inputs, targets = _rows(batch(shape, step), world.rank, world.size)
        loss = model.train_step(inputs, targets, loss_fn)
        gradient_bytes = sum(group.num_bytes_held for group in model.engine.gradients)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        learned.losses.append(loss.item())
        if world.rank == 0:
            _write(news, step + 1, learned.losses[-1])
    learned.seconds = statistics.median(times[_WARM_UP:])
    learned.moved = (_moved(world) - moved_before) / (num_steps - _WARM_UP)
    learned.held = {
        "parameters": sum(group.num_bytes_held for group in model.engine.groups),
        "gradients": gradient_bytes,
        "state": _state_bytes(optimizer),
    }
    parameters = model.state_dict()
    learned.parameters = parameters if world.rank == 0 else {}
    return learned


def _rows(whole: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    low, high = offsets(split_sizes(len(whole[0]), size))[rank : rank + 2]
    return whole[0][low:high], whole[1][low:high]


def _moved(world: Any) -> int:
    return sum(counter.num_bytes for counter in world.stats().values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What AdamW keeps for each element; its counters of steps are not worth counting."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.numel() > 1)


def _write(news: str, step: int, loss: float) -> None:
    with open(news, "a", encoding="ascii") as file:
        file.write(f"{step} {loss}\n")

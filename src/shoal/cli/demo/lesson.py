"""What the ranks of `shoal demo` do: train, and measure what it takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.api import as_distributed
from shoal.cli.demo.gpt import GPT, GPTShape, batch, loss_fn
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.comm.world import World, current

# The first steps learn the order of things and warm up memory.
_WARM_UP = 2
# An all-reduce is a reduce-scatter and an all-gather.
_ROUNDS = {"all_reduce": 2}

# How four ranks are arranged where they do not all have data of their own.
OPTIONS = {
    "tensor": {"tensor": 2, "data": 2},
    "pipeline": {"pipeline": 2, "data": 2},
    "hybrid": {"tensor": 2, "pipeline": 2, "data": 1},
}

Tell = Callable[[int, float], None]


@dataclass
class Learned:
    """What a rank brings back.

    Attributes:
        losses: By step.
        seconds: A step's, the median.
        parameters: The trained ones by name; only on rank 0.
        held: Bytes of parameters, gradients and optimizer state that this rank holds in a step.
        moved: Bytes between this rank and the others in a step, on average.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    parameters: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    moved: float = 0.0


def make(shape: GPTShape) -> tuple[GPT, torch.optim.Optimizer]:
    """The same model each time."""
    torch.manual_seed(0)
    model = GPT(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)


def learn_alone(shape: GPTShape, num_steps: int, tell: Tell) -> Learned:
    """One process, the plain loop, on one core as each rank is."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _learn_alone(shape, num_steps, tell)
    finally:
        torch.set_num_threads(num_threads)


def _learn_alone(shape: GPTShape, num_steps: int, tell: Tell) -> Learned:
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


def learn_together(
    strategies: Sequence[str], shape: GPTShape, num_steps: int, news: str
) -> dict[str, Learned]:
    """One rank of many, under one strategy after the other.

    Rank 0 writes each step's loss to the file ``news``: ranks are processes, a file reaches all.
    """
    learned = {}
    for strategy in strategies:
        learned[strategy] = _learn_together(strategy, shape, num_steps, news)
        gc.collect()  # hooks make cycles: let go of one model before the next
    return learned


def _learn_together(strategy: str, shape: GPTShape, num_steps: int, news: str) -> Learned:
    world = current()
    wrap: Callable[..., Any] = as_distributed
    model, optimizer = wrap(*make(shape), strategy=strategy, **OPTIONS.get(strategy, {}))
    data = model.data_group
    learned, times, moved_before = Learned(), [], 0.0
    for step in range(num_steps):
        if step == _WARM_UP:
            moved_before = _moved(world)
        begin = time.perf_counter()
        inputs, targets = _rows(batch(shape, step), data.rank, data.size)
        loss = model.train_step(inputs, targets, loss_fn)
        gradient_bytes = sum(group.num_bytes_held for group in model.engine.gradients)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        learned.losses.append(loss.item())
        if world.rank == 0:
            _write(news, f"{strategy} {step + 1} {learned.losses[-1]}")
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


def _moved(world: World) -> float:
    """Bytes to and from other ranks, as theory counts: of each payload a rank has its own part."""
    num_bytes = sum(
        counter.num_bytes * _ROUNDS.get(kind, 1) for kind, counter in world.stats().items()
    )
    return num_bytes * (world.size - 1) / world.size


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What AdamW keeps for each element; its counters of steps are not worth counting."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.numel() > 1)


def _write(news: str, line: str) -> None:
    with open(news, "a", encoding="ascii") as file:
        file.write(f"{line}\n")

"""Training by the ranks of tensor groups, and by one process, for comparison."""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from strategies.models import moved, part
from strategies.tensor.tasks import TASKS

STEPS, MAX_NORM, ITEMS, MICRO_BATCHES = 20, 0.05, 8, 2
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One training; every step clips, and every other one accumulates."""

    task: str
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    steps: int = STEPS
    device: str = "cpu"

    def __str__(self) -> str:
        options = "-".join(f"{key}{value}" for key, value in self.options.items())
        return f"{self.task}-{self.ranks}" + (f"-{options}" if options else "")


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases and norms do not: two groups of parameters."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def train_rank(case: Case) -> tuple[State, list[float]]:
    """What each rank does: the whole state, and the norms of the gradients."""
    torch.manual_seed(0)
    module = TASKS[case.task].build().to(case.device)
    optimizer = make_optimizer(module)
    torch.manual_seed(1 + shoal.world().rank)  # whoever draws by rank must not matter
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy="tensor", min_group_bytes=1500, **case.options
    )
    group = model.data_group
    norms = _train(model, optimizer, case, group.rank, group.size, model.no_sync)
    state = model.state_dict()
    del model, optimizer, module
    gc.collect()  # what is left holds groups, and they connections
    return state, norms


@functools.cache
def train_one_process(case: Case) -> tuple[State, list[float]]:
    """The same training without ranks."""
    torch.manual_seed(0)
    module = TASKS[case.task].build().to(case.device)
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    torch.manual_seed(1)
    norms = _train(module, make_optimizer(module), case, 0, 1, contextlib.nullcontext)
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    assert any(not torch.equal(value, before[name]) for name, value in state.items())
    return state, norms


def _train(
    model: Any, optimizer: Any, case: Case, rank: int, size: int, holding_back: Any
) -> list[float]:
    task, norms = TASKS[case.task], []
    for step in range(case.steps):
        task.before_step(model, step)
        batch = part(moved(task.batch(step, ITEMS), case.device), rank, size)
        optimizer.zero_grad()
        pieces = MICRO_BATCHES if step % 2 else 1
        for index in range(pieces):
            with holding_back() if index < pieces - 1 else contextlib.nullcontext():
                (task.loss(model, part(batch, index, pieces)) / pieces).backward()
        if isinstance(model, shoal.strategies.ShardedModel):
            norm = model.clip_grad_norm_(MAX_NORM)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm))
        optimizer.step()
    return norms


def compare(case: Case, results: list[tuple[State, list[float]]]) -> None:
    """Ranks have the same bits, and all are what one process has."""
    alone = replace(case, ranks=1, options={})
    expected, expected_norms = train_one_process(alone)
    tolerance = TASKS[case.task].tolerance
    for state, norms in results:
        assert list(state) == list(expected)
        for name, value in state.items():
            assert torch.equal(value, results[0][0][name]), f"{name} differs between ranks"
            assert value.shape == expected[name].shape
            off = (value.double() - expected[name].double()).abs().max().item()
            assert off <= tolerance, f"{name} is off by {off:.3g}"
        for norm, other in zip(norms, expected_norms, strict=True):
            assert abs(norm - other) <= tolerance * max(1.0, other)

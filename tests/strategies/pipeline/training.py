"""Training by the ranks of a pipeline, and by one process, for comparison."""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

import shoal
from strategies.models import moved
from strategies.pipeline.tasks import TASKS

STEPS = 20
ITEMS = 8
MAX_NORM = 0.05


@dataclass(frozen=True)
class Case:
    """One training, by ``ranks`` ranks."""

    task: str = "gpt"
    ranks: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    mode: str = "plain"
    steps: int = STEPS
    data: int = field(default=1)
    device: str = "cpu"

    @property
    def named(self) -> dict[str, Any]:
        return dict(self.options) | ({"data": self.data} if self.data > 1 else {})

    def __str__(self) -> str:
        values = "-".join(str(value) for _, value in self.options)
        return f"{self.task}-{self.ranks}-{values}-{self.mode}"


def case(task: str = "gpt", ranks: int = 2, mode: str = "plain", steps: int = STEPS, **options):
    data = options.pop("data", 1)
    return Case(task, ranks, tuple(sorted(options.items())), mode, steps, data)


def optimizer_of(module):
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def _part(tree: Any, index: int, count: int) -> Any:
    def cut(leaf: Any) -> Any:
        return leaf.chunk(count)[index] if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(cut, tree)


def train_rank(wanted: Case) -> dict[str, Any]:
    """What each rank does; returns the whole model's state, and the losses."""
    task = TASKS[wanted.task]
    torch.manual_seed(0)
    module = task.build().to(wanted.device)
    model, optimizer = shoal.as_distributed(
        module, optimizer_of(module), strategy="pipeline", **wanted.named
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    losses = []
    for step in range(wanted.steps):
        group = model.data_group
        batch = _part(_batch(wanted, step), group.rank, group.size)
        optimizer.zero_grad()
        losses.append(_gradients(model, task, batch, wanted.mode))
        optimizer.step()
        schedule.step()
    return {"losses": losses, **model.state_dict()}


def train_rank_of_pool(wanted: Case) -> dict[str, Any]:
    """As `train_rank`, and leaves no garbage."""
    state = train_rank(wanted)
    gc.collect()
    return state


def _gradients(model, task, batch, mode) -> float:
    if mode == "clip":
        loss = model.train_step(*batch, task.loss)
        model.clip_grad_norm_(MAX_NORM)
        return float(loss)
    if mode == "plain":
        return float(model.train_step(*batch, task.loss))
    # Each half is a mean by itself, so gradients of the two are those of twice the mean.
    total = 0.0
    for index in range(2):
        with model.no_sync() if index == 0 else contextlib.nullcontext():
            total += float(model.train_step(*_part(batch, index, 2), task.loss))
    return total / 2


def _batch(wanted: Case, step: int) -> Any:
    """Of all ranks together."""
    return moved(TASKS[wanted.task].batch(step, ITEMS * wanted.data), wanted.device)


@functools.cache
def train_one_process(wanted: Case) -> dict[str, Any]:
    """The state after the same training in one process."""
    task, mode = TASKS[wanted.task], wanted.mode
    torch.manual_seed(0)
    model = task.build().to(wanted.device)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    losses = []
    for step in range(wanted.steps):
        inputs, targets = _batch(wanted, step)
        optimizer.zero_grad()
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = task.loss(output, targets)
        (2 * loss if mode == "accumulate" else loss).backward()
        if mode == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, **{n: v.clone() for n, v in model.state_dict().items()}}


def check(wanted: Case, results: list[dict[str, Any]]) -> None:
    """Every rank has what one process has, under the same names."""
    expected = dict(train_one_process(replace(wanted, ranks=1, options=())))
    tolerance = TASKS[wanted.task].tolerance
    for result in results:
        assert list(result) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.as_tensor(result[name]),
                torch.as_tensor(value),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )

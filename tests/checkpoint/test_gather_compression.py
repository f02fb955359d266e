"""A checkpoint has the masters of parameters that are gathered in 8 bits, with all digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

State = dict[str, Tensor]
each = pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])


def made(strategy: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 12))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return shoal.as_distributed(module, optimizer, strategy=strategy, **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + model.data_group.rank)
        x = torch.randn(4, 12, generator=generator)
        optimizer.zero_grad()
        model.train_step(x, x.flip(1), F.mse_loss)
        optimizer.step()


def whole_state(model: Any) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def save_and_go_on(path: Path, strategy: str, options: Any) -> Any:
    model, optimizer = made(strategy, gather_compression="int8", **options)
    train(model, optimizer, range(4))
    shoal.save(path, model, optimizer, step=4)
    saved = whole_state(model)
    train(model, optimizer, range(4, 8))
    return saved, whole_state(model)


def load_and_go_on(path: Path, strategy: str, options: Any) -> Any:
    model, optimizer = made(strategy, **options)
    train(model, optimizer, range(20, 22))  # so that there is something to overwrite
    shoal.load(path, model, optimizer)
    loaded = whole_state(model)
    train(model, optimizer, range(4, 8))
    return loaded, whole_state(model)


def run(fn: Any, ranks: int, *args: Any) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def check_same(one: State, other: State) -> None:
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("options", [{}, {"compression": "int8"}, {"mixed_precision": "bf16"}])
@each
def test_resumed_to_the_last_bit(tmp_path: Path, strategy: str, options: Any) -> None:
    expected = run(save_and_go_on, 2, tmp_path, strategy, options)
    options = {"gather_compression": "int8", **options}
    found = run(load_and_go_on, 2, tmp_path, strategy, options)
    for (saved, end), (loaded, other_end) in zip(expected, found, strict=True):
        check_same(loaded, saved)
        check_same(other_end, end)


@each
def test_other_ranks_and_other_strategies_load_the_masters(tmp_path: Path, strategy: str) -> None:
    (saved, _), *_ = run(save_and_go_on, 3, tmp_path, strategy, {})
    for other in ("ddp", "zero3"):
        for loaded, _ in run(load_and_go_on, 2, tmp_path, other, {}):
            check_same(loaded, saved)
    for loaded, _ in run(load_and_go_on, 4, tmp_path, "zero2", {"gather_compression": "int8"}):
        check_same(loaded, saved)

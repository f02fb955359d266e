"""Checkpoints of layers that are split and models that are cut into stages, in every direction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.training import assert_same, on_ranks, state
from strategies.test_hybrid import GPT, loss_fn, text

BEFORE, AFTER = range(2), range(2, 4)
Layout = tuple[str, int, dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "plain": ("plain", 1, {}),
    "ddp-2": ("ddp", 2, {}),
    "zero3-4": ("zero3", 4, {"min_group_bytes": 400}),
    "tensor-2": ("tensor", 2, {}),
    "tensor-3": ("tensor", 3, {}),  # heads do not divide
    "tensor-2-zero3-2": ("tensor", 4, {"tensor": 2, "zero": 3}),
    "pipeline-2": ("pipeline", 2, {"micro_batches": 2}),
    "pipeline-2-zero1-2": ("pipeline", 4, {"pipeline": 2, "zero": 1, "micro_batches": 2}),
    "hybrid-2-2-2": ("hybrid", 8, {"tensor": 2, "pipeline": 2, "zero": 2, "micro_batches": 2}),
    "hybrid-2-2": ("hybrid", 4, {"tensor": 2, "pipeline": 2, "micro_batches": 2}),
}
USUAL = [
    ("hybrid-2-2-2", "zero3-4"),
    ("zero3-4", "hybrid-2-2"),
    ("tensor-3", "pipeline-2-zero1-2"),
    ("pipeline-2", "tensor-2-zero3-2"),
    ("plain", "hybrid-2-2"),
    ("tensor-2", "plain"),
]


class Scaled(GPT):
    """With a buffer in every block, which only its stage has."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("table", torch.rand(5))


def build(seed: int, layout: Layout, optimizer: str, device: str = "cpu") -> tuple[Any, Any]:
    strategy, _, options = layout
    torch.manual_seed(seed)
    model: nn.Module = Scaled().double().to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "lr": 0.02}, {"params": others}]
    if optimizer in ("adamw", "fused"):
        made: Any = torch.optim.AdamW(groups, lr=0.01, eps=1e-4, fused=optimizer == "fused")
    else:
        made = torch.optim.Adafactor(groups, lr=0.01)
    if strategy == "plain":
        return model, made
    return shoal.as_distributed(model, made, strategy=strategy, **options)


def train(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        inputs, targets = text(step, device=next(model.parameters()).device.type)
        if isinstance(model, shoal.strategies.ShardedModel):
            data = model.data_group
            share = [rows.chunk(data.size)[data.rank] for rows in (inputs, targets)]
            model.train_step(*share, loss_fn)
        else:
            loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def write(path: Path, layout: Layout, optimizer: str, device: str = "cpu") -> dict[str, Any]:
    model, made = build(0, layout, optimizer, device)
    train(model, made, BEFORE)
    shoal.save(path, model, made, step=2)
    return state(model, made)


def read(
    path: Path, layout: Layout, optimizer: str, device: str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any]]:
    model, made = build(1, layout, optimizer, device)
    assert shoal.load(path, model, made).step == 2
    loaded = state(model, made)
    train(model, made, AFTER)
    return loaded, state(model, made)


def everywhere(fn: Any, path: Path, name: str, *how: str) -> list[Any]:
    """``how``: the optimizer, and the device."""
    layout = LAYOUTS[name]
    if name == "plain":
        return [fn(path, layout, *how)]
    return on_ranks(fn, layout[1], path, layout, *how)


def uninterrupted(optimizer: str) -> dict[str, Any]:
    model, made = build(0, LAYOUTS["plain"], optimizer)
    train(model, made, [*BEFORE, *AFTER])
    return state(model, made)


def pairs() -> Iterator[object]:
    for pair in itertools.product(LAYOUTS, LAYOUTS):
        yield pytest.param(*pair, marks=[] if pair in USUAL else [pytest.mark.full])


@pytest.mark.parametrize(("writer", "reader"), list(pairs()))
def test_any_layout_reads_any_other(writer: str, reader: str, tmp_path: Path) -> None:
    saved = everywhere(write, tmp_path / "run", writer, "adamw")
    for other in saved[1:]:
        assert_same(saved[0], other)
    expected = uninterrupted("adamw")
    for loaded, after in everywhere(read, tmp_path / "run", reader, "adamw"):
        assert_same(loaded, saved[0])
        assert_same(after, expected, tolerance=1e-9)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("tensor-2", "zero3-4"),
        pytest.param("ddp-2", "hybrid-2-2", marks=pytest.mark.full),
        pytest.param("pipeline-2", "tensor-2", marks=pytest.mark.full),
    ],
)
def test_state_of_whole_parameters(writer: str, reader: str, tmp_path: Path) -> None:
    """Adafactor has state of rows and columns, of which no part belongs to an element."""
    saved = everywhere(write, tmp_path / "run", writer, "adafactor")
    for loaded, _ in everywhere(read, tmp_path / "run", reader, "adafactor"):
        assert_same(loaded, saved[0])

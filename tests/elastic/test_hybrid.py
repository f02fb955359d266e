"""Layers are split, models are cut into stages, and ranks are lost: whole replicas come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from elastic import faults
from shoal.elastic import Elastic


class Block(nn.Module):
    """What is split unevenly between two ranks, with a buffer that is saved and one that is not."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.mean += x.detach().mean(0)
        inner = self.dropout(torch.tanh(self.up(self.norm(x))))
        return x + self.down(inner) + 1e-2 * self.mean


class Net(nn.Module):
    """A chain of blocks; two layers are tied, perhaps over two stages, and a bias is frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(3, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.end.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2, "micro_batches": 2}
BOTH = {**TENSOR, **PIPELINE}


@pytest.fixture(autouse=True)
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


def _run(
    ranks: int, elastic: Elastic | None, options: dict[str, Any], *args: Any, dropout: float = 0.4
) -> list[faults.Result]:
    options = {"make_module": Net, "dropout": dropout, **options}
    call = ("hybrid", *args, *(None, 1, -1, None)[len(args) :], options)
    return shoal.run(faults.train, ranks, "memory", args=call, timeout=30, elastic=elastic)


def _check_equal(found: list[faults.Result], expected: list[faults.Result]) -> None:
    assert len(found) == len(expected)
    for mine, reference in zip(found, expected, strict=True):
        assert mine.num_committed == faults.NUM_STEPS
        assert faults.same(mine.parameters, reference.parameters)
        assert faults.same(mine.state, reference.state)
        assert mine.lr == reference.lr


def _lose_at_each(ranks: int, options: dict[str, Any], victim: int, stride: int) -> None:
    expected = _run(ranks, None, options, victim)
    count = expected[victim].num_operations
    assert count > 10
    for nth in range(1, count, stride):
        found = _run(ranks, Elastic(restarts=1), options, victim, 1, nth)
        _check_equal(found, expected)
        assert any(each.changes for each in found)


@pytest.mark.parametrize(
    ("ranks", "options", "victim"),
    [
        (4, {**TENSOR, "zero": 0}, 1),
        (4, {**PIPELINE, "zero": 1}, 2),
        (4, {**BOTH, "zero": 3}, 3),
        (8, {**BOTH, "zero": 2}, 0),
    ],
)
def test_a_lost_rank_is_replaced(ranks: int, options: dict[str, Any], victim: int) -> None:
    _lose_at_each(ranks, options, victim, 13)

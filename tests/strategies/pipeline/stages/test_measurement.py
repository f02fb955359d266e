"""The times of units, by which chunks are balanced."""

from __future__ import annotations

import torch
from torch import nn

from shoal.strategies.pipeline import measure_units
from shoal.strategies.pipeline.stages.units import cut_chain, find_units


def test_cut_by_time() -> None:
    class Slow(nn.Linear):
        def forward(self, x):
            for _ in range(200):
                x = x + 0
            return super().forward(x)

    model = nn.Sequential(Slow(4, 4), *(nn.Linear(4, 4) for _ in range(3)))
    balance = measure_units(model, torch.randn(2, 4), stages=2)
    assert balance["0"] > 2 * balance["1"]
    assert list(cut_chain(find_units(model, 2), 2, balance=balance).values()) == [0, 1, 1, 1]

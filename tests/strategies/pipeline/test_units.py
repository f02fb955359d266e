"""Where models are cut, and which chunk gets which units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.strategies.pipeline import measure_units
from shoal.strategies.pipeline.units import cut_chain, find_units
from strategies.models import GPT


def test_a_list_inside_of_an_ordinary_model() -> None:
    units = find_units(GPT(layers=3), 3)
    assert [(unit.name, unit.is_in_chain) for unit in units] == [
        ("embedding", False),
        ("blocks.0", True),
        ("blocks.1", True),
        ("blocks.2", True),
        ("norm", False),
        ("head", False),
    ]


def test_no_list_at_all() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    assert [unit.name for unit in find_units(Plain(), 2)] == ["one", "two"]


def test_opened_until_there_are_enough() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert [unit.name for unit in find_units(model, 2)] == ["0", "1"]
    assert [unit.name for unit in find_units(model, 3)] == ["0.0", "0.1", "1"]


def test_the_largest_chunk_is_as_small_as_can_be() -> None:
    model = nn.Sequential(*(nn.Linear(size, 1) for size in (8, 1, 1, 1, 1, 8)))
    chunks = cut_chain(find_units(model, 3), 3)
    assert list(chunks.values()) == [0, 1, 1, 1, 1, 2]


def test_cut_by_name() -> None:
    units = find_units(GPT(layers=4), 2)
    chunks = cut_chain(units, 2, cut=["blocks.3"])
    assert [name for name, chunk in chunks.items() if chunk] == ["blocks.3", "norm", "head"]


@pytest.mark.parametrize("cut", [["blocks.9"], ["blocks.1", "blocks.2"], ["blocks.0"]])
def test_impossible_cuts_name_the_units(cut) -> None:
    with pytest.raises(ValueError, match=r"blocks\.0, blocks\.1"):
        cut_chain(find_units(GPT(layers=4), 2), 2, cut=cut)


def test_too_many_stages() -> None:
    with pytest.raises(ValueError, match=r"into 2 parts \(0, 1\), and 3 are needed"):
        cut_chain(find_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3), 3)
    with pytest.raises(ValueError, match=r"cannot be cut into parts, of which 3 are"):
        cut_chain(find_units(nn.Linear(2, 2), 3), 3)


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

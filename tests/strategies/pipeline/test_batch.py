"""Batches: which take the same route, how they are cut into micro-batches, and their loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.strategies.pipeline.batch import Losses, count_parts, kind_of, mode_of, split

ALONE: Any = SimpleNamespace(size=1, device=torch.device("cpu"))


def test_tensors_with_the_rows_of_the_batch_are_cut() -> None:
    table = torch.ones(3, 3)
    parts = split({"x": torch.arange(5), "table": table, "n": 7}, torch.arange(5), 5, 2)
    assert [part.inputs["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part.targets.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part.inputs["table"] is table and part.inputs["n"] == 7 for part in parts)
    assert [part.share for part in parts] == [0.6, 0.4]


def test_an_empty_batch_has_as_many_parts() -> None:
    parts = split(torch.empty(0, 2), None, 0, 4)
    assert [tuple(part.inputs.shape) for part in parts] == [(0, 2)] * 4
    assert sum(part.share for part in parts) == 1


@pytest.mark.parametrize(("rows", "expected"), [(9, 4), (3, 3), (0, 4)])
def test_no_more_parts_than_rows(rows, expected) -> None:
    assert count_parts(rows, 4, ALONE) == expected


def test_scaled_losses_add_up_to_the_mean() -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    batches = split(x, y, 5, 2)
    losses = Losses(batches, torch.nn.functional.mse_loss, 5.0, ALONE)
    total = sum(losses.scaled(number, batch.inputs) for number, batch in enumerate(batches))
    torch.testing.assert_close(total, torch.nn.functional.mse_loss(x, y))


def test_numbers_in_tensors_do_not_count() -> None:
    assert kind_of((torch.zeros(2, 3), {"n": 1})) == kind_of((torch.ones(2, 3), {"n": 1}))


def test_sizes_are_apart_from_structure() -> None:
    short, long = kind_of(torch.zeros(2, 3)), kind_of(torch.zeros(2, 4))
    assert short.structure == long.structure
    assert short.sizes != long.sizes


def test_structure_has_dtypes_dimensions_and_plain_values() -> None:
    x = torch.zeros(2, 3)
    others = [x.double(), x[0], (x,), [x], (x, True), (x, 1), (x, "1"), (x, None), {"x": x}]
    kinds = [kind_of(each).structure for each in (x, *others)]
    assert len(set(kinds)) == len(kinds)


def test_modes_of_a_model() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    modes = [mode_of(module)]
    with torch.no_grad():
        modes.append(mode_of(module))
    with torch.autocast("cpu", torch.bfloat16):
        modes.append(mode_of(module))
    module[1].eval()
    modes.append(mode_of(module))
    assert len(set(modes)) == 4

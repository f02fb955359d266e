"""Batches cut into micro-batches, and the loss of the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.strategies.pipeline.running.micro_batches import Losses, count_parts, split

ALONE: Any = SimpleNamespace(size=1, device=torch.device("cpu"))


def test_tensors_with_the_rows_of_the_batch_are_cut() -> None:
    table = torch.ones(3, 3)
    parts = split({"x": torch.arange(5), "table": table, "n": 7}, torch.arange(5), 2)
    assert [part.inputs["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part.targets.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part.inputs["table"] is table and part.inputs["n"] == 7 for part in parts)
    assert [part.share for part in parts] == [0.6, 0.4]


def test_an_empty_batch_has_as_many_parts() -> None:
    parts = split(torch.empty(0, 2), None, 4)
    assert [tuple(part.inputs.shape) for part in parts] == [(0, 2)] * 4
    assert sum(part.share for part in parts) == 1


@pytest.mark.parametrize(("rows", "expected"), [(9, 4), (3, 3), (0, 4)])
def test_no_more_parts_than_rows(rows, expected) -> None:
    assert count_parts(torch.zeros(rows, 2), 4, ALONE) == expected


def test_scaled_losses_add_up_to_the_mean() -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    batches = split(x, y, 2)
    losses = Losses(batches, torch.nn.functional.mse_loss, 5.0, ALONE)
    total = sum(losses.scaled(number, batch.inputs) for number, batch in enumerate(batches))
    torch.testing.assert_close(total, torch.nn.functional.mse_loss(x, y))

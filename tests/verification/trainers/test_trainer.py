"""Batches of all ranks, and each rank's rows of them."""

from __future__ import annotations

import torch

from shoal.verification.trainers.trainer import share, take


def test_shares() -> None:
    batch = ({"a": torch.arange(5), "b": torch.ones(2, 5)}, [torch.arange(5), 3])
    shares = [share(batch, rank, 3) for rank in range(3)]
    assert [inputs["a"].tolist() for inputs, _ in shares] == [[0, 1], [2, 3], [4]]
    assert all(inputs["b"].shape == (2, 5) for inputs, _ in shares)
    assert [targets[0].tolist() for _, targets in shares] == [[0, 1], [2, 3], [4]]


def test_batches_are_used_again() -> None:
    assert take(iter([(0, 0), (1, 1)]), 5) == [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]

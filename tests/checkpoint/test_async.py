"""Checkpoints of parameters that live on servers: as with any sharded strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from checkpoint.replicas import State, made, run, train

pytestmark = pytest.mark.timeout(60)


def moments(optimizer: Any) -> State:
    state = optimizer.state_dict()["state"]
    return {number: values["exp_avg"] for number, values in state.items()}


def save_and_go_on(path: Path, wait: bool = True) -> Any:
    model, optimizer = made("async")
    train(model, optimizer, range(4))
    saving = shoal.save(path, model, optimizer, wait=wait)
    saved, kept = model.state_dict(), moments(optimizer)
    train(model, optimizer, range(4, 6))
    saving.wait()
    model.state_dict()  # nobody leaves while others still train
    return saved, kept


def load(path: Path) -> Any:
    model, optimizer = made("async")
    train(model, optimizer, range(20, 22))  # so that there is something to overwrite
    shoal.load(path, model, optimizer)
    saved, kept = model.state_dict(), moments(optimizer)
    train(model, optimizer, range(4, 6))
    model.state_dict()
    return saved, kept


def assert_equal(found: State, expected: State) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("wait", [True, False])
def test_servers_go_on_from_the_last_bit(tmp_path: Path, wait: bool) -> None:
    """In which order the next updates come is no part of it."""
    expected = run(save_and_go_on, 3, tmp_path, wait)
    for (saved, kept), (others_saved, others_kept) in zip(
        run(load, 3, tmp_path), expected, strict=True
    ):
        assert_equal(saved, others_saved)
        assert_equal(kept, others_kept)


@pytest.mark.parametrize("strategy", ["async", "zero3", "local"])
def test_other_numbers_of_ranks_and_strategies(tmp_path: Path, strategy: str) -> None:
    saved, kept = run(save_and_go_on, 3, tmp_path / "first")[0]

    def go_back(path: Path) -> Any:
        model, optimizer = made(strategy)
        shoal.load(path / "first", model, optimizer)
        shoal.save(path / "second", model, optimizer)
        return model.state_dict()

    for state in run(go_back, 2, tmp_path):
        assert_equal(state, saved)
    for state, others_kept in run(load, 1, tmp_path / "second"):
        assert_equal(state, saved)
        assert_equal(others_kept, kept)

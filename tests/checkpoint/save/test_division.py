"""Ranks divide the writing once, and again when anybody holds something else or has forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from checkpoint.memory_disk import MemoryDisk
from checkpoint.training import assert_same, build, on_ranks, state, train, wrap
from shoal.checkpoint.save import division

ROOT = Path("run")


@pytest.fixture
def divisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each division that was worked out by any rank, how many ranks it was for."""
    counted: list[int] = []
    assign = division.assign

    def counting(claims: Any) -> Any:
        counted.append(len(claims))
        return assign(claims)

    monkeypatch.setattr(division, "assign", counting)
    return counted


def save_often(disk: MemoryDisk, divisions: list[int], forgetful: int | None) -> Any:
    """How many divisions there were after each save, and the last state."""
    model, optimizer = wrap("zero2", *build())
    counts = []
    for step in range(4):
        shoal.save(ROOT, model, optimizer, filesystem=disk, wait=step % 2 == 0).wait()
        shoal.world().barrier()
        counts.append(len(divisions))
        shoal.world().barrier()
        if step != 1:
            train(model, optimizer, [step])
        if step == 1 and forgetful == shoal.world().rank:
            del division._last[model.all_ranks]
    shoal.save(ROOT, model, optimizer, filesystem=disk)
    return counts, state(model, optimizer)


def load(disk: MemoryDisk) -> Any:
    model, optimizer = wrap("ddp", *build())
    shoal.load(ROOT, model, optimizer, filesystem=disk)
    return state(model, optimizer)


@pytest.mark.parametrize("forgetful", [None, 0, 2])
def test_once_while_all_remember(divisions: list[int], forgetful: int | None) -> None:
    disk = MemoryDisk()
    results = on_ranks(save_often, 3, disk, divisions, forgetful)
    # The first step makes state of the optimizer, so that there is more to divide.
    expected = [3, 6, 6, 6] if forgetful is None else [3, 6, 9, 9]
    assert [counts for counts, _ in results] == [expected] * 3
    for loaded in on_ranks(load, 2, disk):
        assert_same(loaded, results[0][1])

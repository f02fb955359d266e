"""Who writes what: each element once, and divided again only if anybody holds something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from checkpoint.memory_disk import MemoryDisk
from checkpoint.training import assert_same, build, on_ranks, state, train, wrap
from shoal.checkpoint.save import division
from shoal.checkpoint.save.division import Claim, assign
from shoal.sharding.extent import Extent
from shoal.sharding.split import Split

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


def claim(shape: tuple[int, ...], *runs: tuple[int, int], split: Split | None = None) -> Claim:
    size = torch.Size(shape)
    extents = [Extent(size, start, stop, split) for start, stop in runs]
    return Claim(torch.float32, size, tuple(extents))


@st.composite
def held(draw: st.DrawFn) -> list[dict[str, Claim]]:
    """Each rank holds a run of each tensor; together they hold all of it."""
    num_ranks = draw(st.integers(1, 5))
    claims: list[dict[str, Claim]] = [{} for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 40))
        runs = []
        for _ in range(num_ranks):
            low, high = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
            runs.append((low, high))
        runs[draw(st.integers(0, num_ranks - 1))] = (0, size)
        for own, run in zip(claims, runs, strict=True):
            own[f"t{number}"] = claim((size,), run)
    return claims


@given(held())
def test_each_element_is_written_once_by_one_that_has_it(claims: list[dict[str, Claim]]) -> None:
    work = assign(claims)
    for key, first in claims[0].items():
        written = torch.zeros(first.shape.numel(), dtype=torch.int64)
        for own, mine in zip(work, claims, strict=True):
            for extent in own.get(key, []):
                written[extent.start : extent.stop] += 1
                (has,) = mine[key].extents
                assert has.start <= extent.start <= extent.stop <= has.stop
        assert (written == 1).all()
        assert any(key in own for own in work)  # also a tensor without elements


def sizes(work: Any) -> list[int]:
    return [sum(e.num_elements for extents in own.values() for e in extents) for own in work]


def test_replicas_divide_the_work() -> None:
    large = claim((1 << 20,), (0, 1 << 20))
    assert sizes(assign([{"w": large}] * 4)) == [1 << 18] * 4
    many = {f"w{number}": claim((100,), (0, 100)) for number in range(40)}
    assert sizes(assign([many] * 4)) == [1000] * 4


def test_runs_that_were_cut_in_other_places() -> None:
    """As tensor-parallel ranks of different sizes cut what they have in common."""
    claims = [
        {"w": claim((30,), (0, 12))},
        {"w": claim((30,), (12, 30))},
        {"w": claim((30,), (0, 17))},
        {"w": claim((30,), (17, 30))},
    ]
    assert sum(sizes(assign(claims))) == 30


def test_parts_of_a_tensor() -> None:
    shape = torch.Size([4, 6])
    halves = [Split(shape, 1, ((0, 3),)), Split(shape, 1, ((3, 6),))]
    claims = [{"w": claim((4, 6), (0, 12), split=split)} for split in halves for _ in range(2)]
    work = assign(claims)
    assert sum(sizes(work)) == 24
    assert [own["w"][0].split for own in (work[0], work[2])] == halves


def test_the_first_ranks_values_count() -> None:
    size = torch.Size([1 << 20])
    buffer = Claim(torch.float32, size, (Extent.whole(size),), is_same_everywhere=False)
    assert sizes(assign([{}, {"b": buffer}, {"b": buffer}])) == [0, 1 << 20, 0]


def test_tensors_that_differ() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) on rank 0, .* \(4,\) on rank 1"):
        assign([{"w": claim((3,), (0, 3))}, {"w": claim((4,), (0, 4))}])

"""A rank is lost at every operation of a step in turn: training goes on as if nothing had been."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import shoal
from elastic import faults
from shoal.elastic import Elastic
from shoal.errors import ShoalError

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@pytest.fixture(autouse=True)
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


def _run(ranks: int, elastic: Elastic | None, *args: Any) -> list[faults.Result]:
    return shoal.run(faults.train, ranks, "memory", args=args, timeout=30, elastic=elastic)


def _check_equal(found: list[faults.Result], expected: list[faults.Result]) -> None:
    assert len(found) == len(expected)
    for mine, reference in zip(found, expected, strict=True):
        assert mine.num_committed == faults.NUM_STEPS
        assert faults.same(mine.parameters, reference.parameters)
        assert faults.same(mine.state, reference.state)
        assert mine.lr == reference.lr


def _check_samples(found: list[faults.Result]) -> None:
    """Of attempts that count, that is of the last at each step, each sample exactly once."""
    for step in range(faults.NUM_STEPS):
        counted = [dict(each.samples).get(step) for each in found]
        whole = [number for own in counted if own is not None for number in own]
        assert len(set(whole)) == len(whole)


PAIRS = [
    ("ddp", 2, 0), ("ddp", 3, 1), ("zero1", 2, 1), ("zero1", 4, 3), ("zero2", 3, 0),
    ("zero2", 4, 2), ("zero3", 2, 0), ("zero3", 3, 2), ("fsdp", 4, 1),
]  # fmt: skip
ALL = [
    (strategy, ranks, victim)
    for strategy, ranks in product((*STRATEGIES, "fsdp"), (2, 3, 4))
    for victim in range(ranks)
]


def _lose_at_each(strategy: str, ranks: int, victim: int, stride: int) -> None:
    """Over a step in the middle of an epoch, the beginning of the next epoch and its first step."""
    expected = _run(ranks, None, strategy, victim)
    count = expected[victim].num_operations
    assert count > 10
    for nth in range(1, count, stride):
        found = _run(ranks, Elastic(restarts=1), strategy, victim, 1, nth)
        _check_equal(found, expected)
        _check_samples(found)
        assert any(each.changes for each in found)


@pytest.mark.parametrize(("strategy", "ranks", "victim"), PAIRS)
def test_a_lost_rank_is_replaced(strategy: str, ranks: int, victim: int) -> None:
    _lose_at_each(strategy, ranks, victim, 5)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("strategy", "ranks", "victim"), ALL)
def test_a_lost_rank_is_replaced_at_every_operation(strategy: str, ranks: int, victim: int) -> None:
    _lose_at_each(strategy, ranks, victim, 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_another_is_lost_while_the_others_recover(strategy: str) -> None:
    """Of four ranks the buddy of neither: what is kept of the step before must do."""
    expected = _run(4, None, strategy, 0)
    for nth in range(1, 60, 7):
        found = _run(4, Elastic(restarts=2), strategy, 0, 1, 3, (2, nth))
        _check_equal(found, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_with_fewer(strategy: str) -> None:
    found = _run(3, Elastic(min_ranks=2), strategy, 1, 1, 4)
    assert [each.num_committed for each in found] == [faults.NUM_STEPS] * 2
    assert faults.same(found[0].parameters, found[1].parameters)
    for each in found:
        (change,) = each.changes
        assert (change.old_size, change.new_size, change.left) == (3, 2, (1,))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp"])
def test_another_is_lost_at_every_operation_of_a_recovery(strategy: str) -> None:
    """And of what comes after it, to the end; of four ranks, and of three that are replaced."""
    expected = _run(4, None, strategy, 0)
    count = expected[0].num_operations
    for nth in range(1, count + 60):
        found = _run(4, Elastic(restarts=2), strategy, 0, 1, 3, (2, nth))
        _check_equal(found, expected)


@pytest.mark.parametrize("victim", [1, 3])
def test_one_that_leaves_stays_until_a_loss_is_made_good(victim: int) -> None:
    """Of its neighbour, whose state only it has, or who has the copy of its own."""

    def run() -> tuple[int, int]:
        first, world = shoal.world().rank, shoal.world()
        model, optimizer, loader, _ = faults.make_training("zero3")
        for _ in loader.epochs(faults.EPOCHS):
            for inputs, numbers in loader:
                with optimizer.attempt():
                    if (optimizer.num_committed, optimizer.generation) == (1, 1):
                        if first == 2:
                            world.leave()
                        if first == victim:
                            raise faults.Lost
                    model.train_step(inputs, numbers, faults.loss_of)
                    optimizer.step()
                    optimizer.zero_grad()
        return optimizer.num_committed, shoal.world().size

    found = shoal.run(run, 4, "memory", elastic=Elastic(), timeout=30)
    assert found == [(faults.NUM_STEPS, 2)] * 2


def test_too_few_are_left() -> None:
    with pytest.raises(faults.Lost):
        _run(2, Elastic(min_ranks=2), "ddp", 1, 1, 4)


def test_a_rank_and_its_buddy_are_lost_together() -> None:
    with pytest.raises((ShoalError, faults.Lost)):
        _run(4, Elastic(), "zero3", 0, 1, 3, (1, 1))

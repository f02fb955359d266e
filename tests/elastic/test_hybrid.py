"""Layers are split, models are cut into stages, and ranks are lost: whole replicas come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from elastic import faults
from elastic.chain import Chain
from shoal.elastic import Elastic

TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2, "micro_batches": 2}
BOTH = {**TENSOR, **PIPELINE}


@pytest.fixture(autouse=True)
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


def _run(
    ranks: int, elastic: Elastic | None, options: dict[str, Any], *args: Any, dropout: float = 0.4
) -> list[faults.Result]:
    options = {"make_module": Chain, "dropout": dropout, **options}
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
    _lose_at_each(ranks, options, victim, 60)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("options", [TENSOR, PIPELINE, BOTH])
def test_a_lost_rank_is_replaced_at_every_operation(options: dict[str, Any], zero: int) -> None:
    ranks = 8 if options is BOTH else 4
    for victim in (0, ranks - 2):
        _lose_at_each(ranks, {**options, "zero": zero}, victim, 3)


class Normed(nn.Module):
    """With BatchNorm, which one replica after the other sees its rows of."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(self.norm(self.first(x))))
        return self.last(self.dropout(x))


def adafactor(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Sees whole parameters."""
    return torch.optim.Adafactor(groups, lr=lr)


CASES: dict[str, dict[str, Any]] = {
    "whole parameters": {**BOTH, "make_optimizer": adafactor},
    "whole parameters, divided": {**PIPELINE, "make_optimizer": adafactor, "zero": 1},
    "int8": {**TENSOR, "compression": "int8"},
    "topk": {**PIPELINE, "compression": "topk:0.2", "zero": 1},
    "powersgd": {**BOTH, "compression": "powersgd:2"},
    "bf16": {**PIPELINE, "make_module": Normed, "mixed_precision": "bf16", "zero": 3},
    "activations": {**TENSOR, "activations": "full"},
    "activations of stages": {**PIPELINE, "activations": "full", "zero": 2},
    "automatic activations": {**PIPELINE, "activations": "auto", "memory": "1GB"},
    "zero-bubble": {**PIPELINE, "schedule": "zero-bubble"},
    "interleaved": {**PIPELINE, "schedule": "interleaved", "zero": 3},
    "gpipe": {**PIPELINE, "schedule": "gpipe"},
    "BatchNorm": {**PIPELINE, "make_module": Normed},
    "synchronized BatchNorm": {**BOTH, "make_module": Normed, "sync_batchnorm": True},
    "a plan": {**TENSOR, "plan": {"blocks.*.up": "column"}},
    "a cut": {**BOTH, "cut": ["blocks.2"]},
    "a number of replicas": {**TENSOR, "data": 2},
}


def _combine(name: str, times: int) -> None:
    options = CASES[name]
    replica = options.get("tensor", 1) * options.get("pipeline", 1)
    expected = _run(2 * replica, None, options, 1)
    count = expected[1].num_operations
    for nth in (count * time // (times + 1) for time in range(1, times + 1)):
        found = _run(2 * replica, Elastic(restarts=1), options, 1, 1, nth)
        _check_equal(found, expected)
        assert any(each.changes for each in found)


@pytest.mark.parametrize("name", ["whole parameters, divided", "powersgd", "a cut", "activations"])
def test_what_else_a_training_has(name: str) -> None:
    _combine(name, 1)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_all_that_a_training_may_have(name: str) -> None:
    _combine(name, 5)


@pytest.mark.full
def test_another_is_lost_while_the_others_recover() -> None:
    options = {**BOTH, "zero": 3}
    expected = _run(8, None, options, 0)
    for nth in range(1, 90, 9):
        _check_equal(_run(8, Elastic(restarts=2), options, 0, 1, 3, (1, nth)), expected)


@pytest.mark.parametrize(
    ("ranks", "options", "nth"),
    [
        (4, {**TENSOR, "zero": 1}, 30),
        (6, {**PIPELINE, "zero": 3}, 20),
        (8, {**BOTH, "zero": 0}, 33),
    ],
)
def test_training_goes_on_with_a_replica_less(
    ranks: int, options: dict[str, Any], nth: int
) -> None:
    """The global batch stays, so losses are those of one process."""
    replica = options.get("tensor", 1) * options.get("pipeline", 1)
    (alone,) = _run(1, None, {"seed": 3}, dropout=0.0)
    found = _run(ranks, Elastic(), {**options, "seed": 3}, 1, 1, nth, dropout=0.0)
    assert [each.num_committed for each in found] == [faults.NUM_STEPS] * (ranks - replica)
    for each in found:
        (change,) = each.changes
        assert (change.old_size, change.new_size) == (ranks, ranks - replica)
        assert set(change.left) == set(range(replica))
        assert sum("another replica" in why for why in change.reasons.values()) == replica - 1
        assert dict(each.losses) == pytest.approx(dict(alone.losses), abs=1e-5)
        assert faults.same(each.parameters, found[0].parameters)
        for name, value in alone.parameters.items():
            assert (each.parameters[name] - value).abs().max() < 1e-4
    _check_samples(found, replica)


@pytest.mark.parametrize("options", [{**TENSOR, "zero": 1}, {**PIPELINE, "zero": 2}])
def test_what_is_left_of_two_replicas_is_one(options: dict[str, Any]) -> None:
    """Ranks have other layers then, or other parts of them."""
    (alone,) = _run(1, None, {"seed": 3}, dropout=0.0)
    found = _run(6, Elastic(), {**options, "seed": 3}, (1, 2), 1, 1, dropout=0.0)
    assert [each.num_committed for each in found] == [faults.NUM_STEPS] * 4
    for each in found:
        (change,) = each.changes
        assert (change.new_size, change.left) == (4, (1, 2))
        assert dict(each.losses) == pytest.approx(dict(alone.losses), abs=1e-5)
        for name, value in alone.parameters.items():
            assert (each.parameters[name] - value).abs().max() < 1e-4


@pytest.mark.parametrize("nth", range(1, 60, 7))
def test_one_of_another_replica_is_lost_while_the_others_recover(nth: int) -> None:
    """Where ranks were between two layouts, they had to find their way from there."""
    options = {**TENSOR, "zero": 1, "seed": 3}
    found = _run(6, Elastic(), options, 1, 1, 1, (2, nth), dropout=0.0)
    assert [each.num_committed for each in found] == [faults.NUM_STEPS] * 4
    for each in found:
        assert each.changes[-1].new_size == 4


def _check_samples(found: list[faults.Result], replica: int) -> None:
    """Each sample of the last epoch is used once by the ranks that train it together."""
    steps_of_epoch = faults.NUM_STEPS // faults.EPOCHS
    used = []
    for first in found[::replica]:
        last = dict(first.samples)
        for step in range(faults.NUM_STEPS - steps_of_epoch, faults.NUM_STEPS):
            used += last[step]
    assert sorted(used) == list(range(faults.NUM_SAMPLES))


def _look(victim: int) -> tuple[int, int, bool, int, int]:
    """Calls of a hook, the generation, the mode, layers that are split, and elements kept."""
    first = shoal.world().rank
    model, optimizer, loader, _ = faults.make_training("hybrid", make_module=Chain, **TENSOR)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    model.blocks[0].up.register_forward_hook(lambda *_: None)  # no plan would split it now
    model.eval()
    inputs, numbers = next(iter(loader))
    for _ in range(2):
        with optimizer.attempt():
            if first == victim and optimizer.num_committed == 1:
                raise faults.Lost
            model.train_step(inputs, numbers, faults.loss_of)
            optimizer.step()
    model(inputs)
    (own,) = optimizer.keeper.own
    kept = sum(each.stop - each.start for each in own.entries if each.key == "model/begin.weight")
    return len(calls), optimizer.generation, model.training, len(model.plan.layers), kept


def test_what_a_user_has_hung_on_a_model_stays() -> None:
    found = shoal.run(_look, 4, "memory", args=(4,), elastic=Elastic(), timeout=30)
    assert [each[:4] for each in found] == [(1, 1, False, 6)] * 4
    assert sum(each[4] for each in found) == 2 * 15  # once for each rank of a tensor group
    found = shoal.run(_look, 4, "memory", args=(3,), elastic=Elastic(), timeout=30)
    assert [each[:4] for each in found] == [(1, 2, False, 6)] * 2
    assert sum(each[4] for each in found) == 2 * 15


def test_less_than_a_replica_is_an_error() -> None:
    with pytest.raises(faults.Lost):
        _run(4, Elastic(), BOTH, 1, 1, 30)

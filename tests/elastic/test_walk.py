"""The number of ranks changes again and again while a model is trained."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import shoal
from elastic import faults
from elastic.chain import Chain
from shoal.elastic import Elastic
from shoal.errors import ShoalError

SIZES = (4, 3, 5, 2, 6, 1, 4)
# One that is killed at a time: a rank and its buddy must not be lost together.
AFTER_KILLS = (3, 5, 4, 3, 2, 6, 5, 4, 3, 2, 1, 4)
# Of replicas of two ranks: one that is asked to go has another wait, who comes back later.
PAIRS, AFTER_PAIRS = (4, 3, 6, 2, 4), (2, 6, 2, 4)
SPLIT = {"make_module": Chain, "seed": 3, "tensor": 2, "zero": 3}
STAGES = {"make_module": Chain, "seed": 3, "pipeline": 2, "micro_batches": 2, "zero": 1}
EPOCHS = 4  # of two steps each


def _walk(
    strategy: str, sizes: tuple[int, ...], options: dict[str, Any], is_killed: bool = False
) -> dict[str, Any]:
    """``is_killed``: ranks that are too many do not leave, but are lost, one after another."""
    model, optimizer, loader, scheduler = faults.make_training(strategy, dropout=0.0, **options)
    stops, samples, losses = [], [], []
    before: list[Any] = []

    def note(change: Any) -> None:
        after = model.state_dict(), optimizer.state_dict()
        stops.append((change.step, change.new_size, *after, list(before)))

    optimizer._on_change = note
    for _ in loader.epochs(EPOCHS):
        for inputs, numbers in loader:
            with optimizer.attempt():
                size = sizes[min(optimizer.num_committed, len(sizes) - 1)]
                if is_killed and shoal.world().rank == shoal.world().size - 1 >= size:
                    raise faults.Lost
                loss = model.train_step(inputs, numbers, _loss)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                _ask_for(sizes[min(optimizer.num_committed + 1, len(sizes) - 1)], is_killed)
                before[:] = model.state_dict(), optimizer.state_dict()
                parts = model.data_group.all_gather_object(numbers.tolist())
            if optimizer.has_committed:
                samples += [number for part in parts for number in part]
                losses.append(loss.item())
    return {"stops": stops, "samples": samples, "losses": losses, "model": model.state_dict()}


def _loss(output: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return faults.loss_of(output, numbers)


def _ask_for(size: int, is_killed: bool) -> None:
    world = shoal.world()
    if world.membership is None:
        return
    if size > world.size and world.rank == 0:
        world.membership.invite(size - world.size)  # type: ignore[attr-defined]
    elif world.rank >= size and not is_killed:
        world.leave()


@pytest.mark.parametrize(
    ("strategy", "options", "sizes", "stops", "is_killed"),
    [
        ("zero3", {}, SIZES, SIZES[1:], False),
        ("zero3", {}, SIZES, AFTER_KILLS, True),
        ("ddp", {}, SIZES, SIZES[1:], False),
        ("ddp", {}, SIZES, AFTER_KILLS, True),
        ("hybrid", SPLIT, PAIRS, AFTER_PAIRS, False),
        ("hybrid", STAGES, PAIRS, AFTER_PAIRS, False),
    ],
)
def test_state_stays_the_same_at_each_stop(
    strategy: str,
    options: dict[str, Any],
    sizes: tuple[int, ...],
    stops: tuple[int, ...],
    is_killed: bool,
) -> None:
    args = (strategy, sizes, options, is_killed)
    found = shoal.run(_walk, 4, "memory", args=args, elastic=Elastic(), timeout=60)
    assert len(found) == sizes[-1]
    stayed = found[0]
    assert [size for _, size, *_ in stayed["stops"]] == list(stops)
    for _, _, model, optimizer, before in stayed["stops"]:
        assert faults.same(model, before[0])
        assert faults.same(optimizer["state"], before[1]["state"])
    everything = sorted([*range(faults.NUM_SAMPLES)] * EPOCHS)
    assert sorted(stayed["samples"]) == everything
    (alone,) = shoal.run(
        _walk,
        1,
        "memory",
        args=(strategy, (1,), {**options, "tensor": 1, "pipeline": 1} if options else {}),
    )
    assert stayed["losses"] == pytest.approx(alone["losses"], abs=1e-5)


def _accumulate(victim: int | None) -> dict[str, Any]:
    first, membership = shoal.world().rank, shoal.world().membership
    is_new = membership is not None and membership.generation == 0
    model, optimizer, loader, _ = faults.make_training("zero2")
    for _ in loader.epochs(3):
        for inputs, numbers in loader:
            with optimizer.attempt():
                is_last = optimizer.num_in_window == 1
                if optimizer.num_committed == 1 and is_last and first == victim and not is_new:
                    raise faults.Lost
                with contextlib.nullcontext() if is_last else model.no_sync():
                    faults.loss_of(model(inputs), numbers).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
    return {"steps": optimizer.num_committed, "model": model.state_dict()}


def test_a_whole_window_is_made_again() -> None:
    expected = shoal.run(_accumulate, 2, "memory", args=(None,))
    found = shoal.run(_accumulate, 2, "memory", args=(1,), elastic=Elastic(restarts=1))
    assert [each["steps"] for each in found] == [3, 3]
    assert faults.same(found[0]["model"], expected[0]["model"])


def _talk(victim: int | None) -> list[Any]:
    """Ranks tell each other something after each step: some die, and others join meanwhile."""
    first, membership = shoal.world().rank, shoal.world().membership
    assert membership is not None
    is_new = membership.generation == 0
    model, optimizer, loader, _ = faults.make_training("zero1")
    told = []
    for _ in loader.epochs(4):
        for inputs, numbers in loader:
            with optimizer.attempt():
                model.train_step(inputs, numbers, faults.loss_of)
                if (first, optimizer.num_committed, is_new) == (victim, 2, False):
                    raise faults.Lost
                optimizer.step()
                optimizer.zero_grad()
                if optimizer.num_committed == 4 and shoal.world().rank == 0:
                    membership.invite(1)  # type: ignore[attr-defined]
            if optimizer.has_committed:
                steps = shoal.world().all_gather_object(optimizer.num_committed)
                told.append((len(steps), set(steps)))
    return told


def test_what_follows_a_step_is_for_those_who_made_it() -> None:
    found = shoal.run(_talk, 2, "memory", args=(1,), elastic=Elastic(restarts=1), timeout=20)
    expected = [(2 if step < 6 else 3, {step}) for step in range(1, 9)]
    assert found == [expected, expected[2:], expected[5:]]


def test_a_step_outside_of_an_attempt_is_refused() -> None:
    def step() -> None:
        _, optimizer, _, _ = faults.make_training("ddp")
        optimizer.step()

    with pytest.raises(ShoalError, match="inside of an attempt"):
        shoal.run(step, 2, "memory")


def test_other_strategies_are_refused() -> None:
    def wrap() -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shoal.as_distributed(model, optimizer, strategy="local", elastic=True)

    with pytest.raises(ShoalError, match="cannot come and go"):
        shoal.run(wrap, 2, "memory")

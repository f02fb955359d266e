"""Training where ranks share memory: one copy of sharded parameters, gradients read in place."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import resource
import signal
import statistics
from typing import Any

import pytest
import torch
from torch import nn

import leaks
import pools
import shoal
from shoal.errors import PeerError, ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.run import run_outcomes
from strategies.loops import (
    assert_same,
    data,
    inside,
    local,
    momentum,
    one_step,
    seeded,
    whole_state,
)

RANKS = 2
STEPS = 6
each = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
shared = pytest.mark.parametrize("strategy", ["zero3", "fsdp"])


def team(fn: Any, *args: Any, ranks: int = RANKS) -> list[Any]:
    return pools.Team("shm", ranks).run(fn, *args)


def wrap(strategy: str, **options: Any) -> Any:
    module = seeded()
    options = {"min_group_bytes": 300, **options}
    return shoal.as_distributed(module, momentum(module), strategy=strategy, **options)


def one_process() -> Any:
    model = seeded()
    optimizer = momentum(model)
    for step in range(STEPS):
        one_step(model, optimizer, data(step, items=12))
    return whole_state(model)


def train(strategy: str, options: dict[str, Any]) -> Any:
    model, optimizer = wrap(strategy, **options)
    shoal.world().reset_stats()
    for step in range(STEPS):
        one_step(model, optimizer, local(step, items=12))
    calls = {name: counter.calls for name, counter in shoal.world().stats().items()}
    addresses = {p.data_ptr() for p in model.parameters()}
    return model.state_dict(), calls, addresses, [g.residence for g in model.engine.groups]


@each
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"min_group_bytes": 0}, {"resident_below": 10}], ids=str)
def test_training_equals_one_process(strategy: str, ranks: int, options: dict[str, Any]) -> None:
    expected = one_process()
    for state, *_ in team(train, strategy, options, ranks=ranks):
        assert_same(state, expected)


@shared
def test_nothing_is_gathered(strategy: str) -> None:
    for _, calls, _, residences in team(train, strategy, {}):
        assert "all_gather" not in calls
        assert calls["gather_in_place"] == 2 * STEPS
        assert set(residences) == {"common"}


def num_bytes_of_a_step(strategy: str) -> dict[str, int]:
    model, optimizer = wrap(strategy)
    one_step(model, optimizer, local(0, items=12))
    shoal.world().reset_stats()
    one_step(model, optimizer, local(1, items=12))
    return {name: counter.num_bytes for name, counter in shoal.world().stats().items()}


@each
def test_what_is_read_from_others_counts_as_if_it_were_sent(strategy: str) -> None:
    (expected, *_) = shoal.run(num_bytes_of_a_step, 2, "memory", args=(strategy,))
    for counted in team(num_bytes_of_a_step, strategy):
        if "gather_in_place" in counted:
            counted["all_gather"] = counted.pop("gather_in_place")
        assert counted == expected


@shared
def test_small_parameters_may_stay_with_every_rank(strategy: str) -> None:
    for *_, residences in team(train, strategy, {"resident_below": 10}):
        assert set(residences) == {"common", "replicated"}


def change_by_hand(strategy: str) -> Any:
    model, optimizer = wrap(strategy)
    one_step(model, optimizer, local(0))
    before = model.state_dict()
    with model.full_parameters(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return before, model.state_dict()


@each
def test_a_change_that_every_rank_makes_is_made_once(strategy: str) -> None:
    for before, after in team(change_by_hand, strategy):
        assert_same(after, {name: 2 * value for name, value in before.items()})


def go_back(strategy: str) -> Any:
    model, optimizer = wrap(strategy)
    start = model.state_dict()
    one_step(model, optimizer, local(0))
    model.load_state_dict(start)
    loaded = model.state_dict()
    return start, loaded


@each
def test_loading(strategy: str) -> None:
    for start, loaded in team(go_back, strategy):
        assert_same(loaded, start, tolerance=0)


def look_while_others_step(strategy: str) -> Any:
    """Rank 0 is late for the step; nobody may change what it computes with before it is there."""
    model, optimizer = wrap(strategy)
    x, y = local(0)
    model.train_step(x, y, nn.functional.mse_loss)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if shoal.world().rank == 0:
        for _ in range(200):
            assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    return not any(map(torch.equal, before, model.parameters()))


@shared
def test_a_rank_that_is_late_computes_with_old_parameters(strategy: str) -> None:
    assert all(team(look_while_others_step, strategy))


def memory_of_changes(strategy: str) -> list[int]:
    gc.collect()  # else a model of another test may end meanwhile
    model, optimizer = wrap(strategy)
    one_step(model, optimizer, local(0))
    held = [_parameter_bytes()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    one_step(model, optimizer, local(1))
    return [*held, _parameter_bytes(), shoal.world().stats().memory["parameters"].peak]


def _parameter_bytes() -> int:
    return shoal.world().stats().memory["parameters"].current


@shared
def test_copies_of_changed_pages_are_counted_and_dropped(strategy: str) -> None:
    for before, after, peak in team(memory_of_changes, strategy):
        assert before == after
        assert peak >= before + mmap.PAGESIZE


def backward_after_step(strategy: str) -> str:
    model, optimizer = wrap(strategy)
    x, y = local(0)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@each
def test_backward_with_parameters_that_have_changed_is_an_error(strategy: str) -> None:
    for message in team(backward_after_step, strategy):
        assert "modified by an inplace operation" in message or "run forward again" in message


# A rank dies in the middle of an update ---------------------------------------------------


def die_in_a_step(strategy: str) -> str:
    model, optimizer = wrap(strategy)
    x, y = local(0)
    model.train_step(x, y, nn.functional.mse_loss)
    if shoal.world().rank == 1:
        inside(optimizer.optimizer, after=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeerError, match="died"):
        optimizer.step()
    with pytest.raises(ShoalError, match="the parameters are a mixture"):
        model(x)
    return "refused"


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_mixture_of_old_and_new_parameters_is_refused(strategy: str) -> None:
    fork_server()
    leaks.baseline()
    survivor, victim = run_outcomes(die_in_a_step, (strategy,), 2, "shm", 30.0)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.value == "refused" or isinstance(survivor.error, PeerError), survivor
    assert survivor.error is None, survivor.traceback


def fail_and_load(strategy: str) -> list[float]:
    """A step that fails on every rank is no end: whoever loads a state goes on from there."""
    model, optimizer = wrap(strategy)
    saved = model.state_dict()
    x, y = local(0)
    model.train_step(x, y, nn.functional.mse_loss)
    inside(optimizer.optimizer, after=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    del optimizer.optimizer.step
    with pytest.raises(ShoalError, match="the parameters are a mixture"):
        model(x)
    model.load_state_dict(saved)
    loss = model.train_step(x, y, nn.functional.mse_loss)
    return [
        loss.item(),
        *[(model.state_dict()[n] - v).abs().max().item() for n, v in saved.items()],
    ]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_loading_mends_a_mixture(strategy: str) -> None:
    for loss, *differences in team(fail_and_load, strategy):
        assert loss > 0
        assert set(differences) == {0.0}


# The heap ---------------------------------------------------------------------------------


def new_pages(strategy: str, steps: int) -> list[int]:
    """How many pages each step got from the system."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model, optimizer = shoal.as_distributed(
        model, torch.optim.AdamW(model.parameters()), strategy=strategy
    )
    inputs, counts = torch.randn(4, 512), [_num_faults()]
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(_num_faults())
    return [after - before for before, after in itertools.pairwise(counts)]


def _num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_steps_use_the_same_memory_again(strategy: str) -> None:
    """The gradients alone are 2,000 pages."""
    for counts in team(new_pages, strategy, 10):
        assert statistics.median(counts[-5:]) < 200, counts

"""Processes that wait for each other: known within seconds, and told in the user's words."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from faults.worlds import (
    SOON_S,
    Outcome,
    assert_prompt,
    outcomes,
    outcomes_between_hosts,
    site_of,
    timed,
    world,
)
from shoal.comm.control.deadlock import watch
from shoal.data import divide
from shoal.errors import DeadlockError, MismatchError, PeerError

PROCESSES = [world("shm", 2), world("gloo", 2), world("mpi", 2, full=True)]


def hurry() -> None:
    """So that tests of what is said, not of when, take less time."""
    watch.LONG_S = watch.CERTAIN_S = 0.3


def assert_deadlock(results: Sequence[Outcome], *lines: str) -> None:
    """All ranks were told, at about the same time, and the text has these lines."""
    for outcome in results:
        assert isinstance(outcome.error, DeadlockError), outcome.traceback
        text = str(outcome.error)
        for line in lines:
            assert line in text, text
    assert_prompt(results)


def world_against_group(first: str) -> None:
    world = shoal.world()
    group = world.subgroup(range(world.size))
    with timed():
        if (world.rank == 0) == (first == "world"):
            world.barrier()  # all of it
        group.all_reduce(torch.ones(1))  # the group


@pytest.mark.parametrize(
    ("backend", "ranks", "first"),
    [
        ("shm", 3, "world"),
        ("shm", 3, "group"),
        ("gloo", 2, "group"),
        pytest.param("mpi", 2, "world", marks=pytest.mark.mpi),
        pytest.param("gloo", 2, "world", marks=pytest.mark.full),
        pytest.param("mpi", 2, "group", marks=[pytest.mark.mpi, pytest.mark.full]),
    ],
)
def test_known_soon(backend: str, ranks: int, first: str) -> None:
    results = outcomes(world_against_group, first, backend=backend, ranks=ranks, timeout=600)
    of_world = site_of(world_against_group, "# all of it")
    of_group = site_of(world_against_group, "# the group")
    alone = 0 if first == "world" else 1
    assert_deadlock(results, f"in world.barrier() at {of_world}", "in the world")
    assert_deadlock(results, f"in group.all_reduce() at {of_group}", "in group 1 of ranks 0, 1")
    if ranks == 2:
        assert f"rank {alone} in world.barrier()" in str(results[0].error)
    for outcome in results:
        assert outcome.error is not None
        assert outcome.error.seconds < SOON_S  # type: ignore[attr-defined]


def test_known_soon_between_hosts() -> None:
    results = outcomes_between_hosts(world_against_group, "world", ranks=3)
    assert_deadlock(results, "in world.barrier() at ", "in group.all_reduce() at ")
    for outcome in results:
        assert outcome.error.seconds < SOON_S  # type: ignore[union-attr]


def cross_groups() -> None:
    """A ring of pairs: each rank begins with another one."""
    hurry()
    world = shoal.world()
    pairs = [world.subgroup([each, (each + 1) % world.size]) for each in range(world.size)]
    for each in (world.rank, (world.rank - 1) % world.size):
        pair = pairs[each]
        assert pair is not None
        pair.all_gather_object("")  # around the ring


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 3), world("gloo", 3), world("shm", 5)])
def test_a_ring_of_groups(backend: str, ranks: int) -> None:
    results = outcomes(cross_groups, backend=backend, ranks=ranks)
    site = site_of(cross_groups, "# around the ring")
    assert_deadlock(results, f"rank 0 in group.all_gather_object() at {site}: waits for rank 1 in")
    for rank in range(ranks):
        line = rf"rank {rank} in .*: waits for rank {(rank + 1) % ranks} in group \d+ of ranks"
        assert re.search(line, str(results[0].error))


def same_ranks_twice() -> None:
    hurry()
    world = shoal.world()
    groups = [world.subgroup([0, 1]), world.subgroup([0, 1])]
    for group in groups if world.rank == 0 else reversed(groups):
        group.barrier()


def test_groups_of_the_same_ranks_have_different_names() -> None:
    results = outcomes(same_ranks_twice, backend="shm", ranks=2)
    assert_deadlock(results, "in group 1 of ranks 0, 1", "in group 2 of ranks 0, 1")


# Messages ---------------------------------------------------------------------------------------


def both_send() -> None:
    hurry()
    world = shoal.world()
    world.send(torch.ones(1), dst=1 - world.rank)  # stuck
    world.recv(src=1 - world.rank)


def receive_what_nobody_sends() -> None:
    hurry()
    world = shoal.world()
    if world.rank == 0:
        world.recv(src=1, tag=3)  # stuck
    else:
        world.barrier()  # stuck too


def wait_for_posted_messages() -> None:
    hurry()
    world = shoal.world()
    if world.rank == 0:
        world.recv(src=1, async_op=True).wait()  # stuck
    else:
        world.backend.start_send(torch.ones(1), 0, tag=5).wait()  # stuck too


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (both_send, "world.send() at {}", "world.send() at {}"),
        (receive_what_nobody_sends, "world.recv() at {}", "world.barrier() at "),
        (wait_for_posted_messages, "work.wait() at {}", "work.wait() at "),
    ],
)
@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_messages(
    backend: str, ranks: int, case: Callable[[], None], first: str, second: str
) -> None:
    results = outcomes(case, backend=backend, ranks=ranks)
    site = site_of(case, "# stuck\n")
    assert_deadlock(results, f"rank 0 in {first.format(site)}: waits for rank 1 in the world")
    assert_deadlock(results, f"rank 1 in {second.format(site)}", "waits for rank 0 in the world")


# Training ---------------------------------------------------------------------------------------


def train(kind: str, strategy: str, folder: str) -> None:
    hurry()
    world = shoal.world()
    if kind == "strategies":
        strategy = "ddp" if world.rank == 0 else "zero3"
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    adam = torch.optim.AdamW(plain.parameters())
    model, optimizer = shoal.as_distributed(plain, adam, strategy=strategy)  # wraps
    if kind == "load":
        shoal.save(folder, model, optimizer)
    for step in range(3):
        loss = model(torch.randn(4, 8) + world.rank).square().mean()  # forward
        loss.backward()  # backward
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and world.rank == 0:
            act_alone(kind, folder, model, optimizer)
    world.barrier()


def act_alone(kind: str, folder: str, model: Any, optimizer: Any) -> None:
    if kind == "save":
        shoal.save(folder, model, optimizer)  # alone
    if kind == "load":
        shoal.load(folder, model, optimizer)  # alone, too
    if kind == "full_state_dict":
        model.full_state_dict()  # full_state_dict
    if kind == "full_parameters":
        with model.full_parameters():  # full_parameters
            pass
    if kind == "loader":
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 8)), 4)
        for _ in divide(data, model):  # loader
            pass


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.full), "zero3"]
)
@pytest.mark.parametrize("kind", ["save", "load"])
@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_one_rank_alone(backend: str, ranks: int, kind: str, strategy: str, tmp_path: Path) -> None:
    results = outcomes(train, kind, strategy, str(tmp_path), backend=backend, ranks=ranks)
    site = site_of(act_alone, f"shoal.{kind}(")
    assert_deadlock(results, f"rank 0 in shoal.{kind}() at {site}: waits for rank 1 in the world")
    elsewhere = {
        f"rank 1 in model.forward() at {site_of(train, '# forward')}",
        f"rank 1 in loss.backward() at {site_of(train, '# backward')}",
    }
    text = str(results[0].error)
    assert any(place in text for place in elsewhere), text
    assert "waits for rank 0 in the traffic of a model or loader of ranks 0, 1" in text


@pytest.mark.parametrize("kind", ["full_state_dict", "full_parameters", "loader"])
@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_other_calls_are_told_as_users_wrote_them(
    backend: str, ranks: int, kind: str, tmp_path: Path
) -> None:
    """A mismatch if the ranks meet in one group, a deadlock if not."""
    results = outcomes(train, kind, "zero3", str(tmp_path), backend=backend, ranks=ranks)
    written = {"loader": "for ... in loader"}.get(kind, f"model.{kind}()")
    call = f"{written} at {site_of(act_alone, f'# {kind}')}"
    for outcome in results:
        assert outcome.failed, "nobody noticed"
        assert re.search(rf"rank 0(:| in) {re.escape(call)}", str(outcome.error)), outcome.traceback
        assert "The deadline has passed" not in str(outcome.error)
    assert_prompt(results)


@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_other_strategies_are_named(backend: str, ranks: int, tmp_path: Path) -> None:
    results = outcomes(train, "strategies", "zero3", str(tmp_path), backend=backend, ranks=ranks)
    for outcome in results:
        assert isinstance(outcome.error, MismatchError), outcome.traceback
        site = site_of(train, "# wraps\n")
        for rank, strategy in enumerate(("ddp", "zero3")):
            told = f"rank {rank}: shoal.as_distributed() at {site}\n    inside: wrapping with "
            assert f"{told}strategy={strategy!r}" in str(outcome.error)
        assert "give it the same arguments on every rank" in str(outcome.error)
    assert_prompt(results)


# Mismatches -------------------------------------------------------------------------------------


def train_unevenly(kind: str, strategy: str) -> None:
    """Rank 1 leaves out a call in the second step."""
    torch.manual_seed(shoal.world().rank)
    plain = nn.Linear(8, 8)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(plain, sgd, strategy=strategy)
    for step in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        left_out = kind if step == 1 and shoal.world().rank == 1 else ""
        if left_out != "backward":
            loss.backward()  # uneven backward
        if left_out != "step":
            optimizer.step()  # uneven step
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("backend", "kind", "strategy"),
    [
        ("shm", "step", "zero1"),
        ("shm", "step", "zero3"),
        ("shm", "backward", "ddp"),
        ("gloo", "step", "zero1"),
        ("gloo", "backward", "ddp"),
    ],
)
def test_a_call_left_out_is_told_by_calls_of_the_users(
    backend: str, kind: str, strategy: str
) -> None:
    backward = f"loss.backward() at {site_of(train_unevenly, '# uneven backward')}\n"
    step = f"optimizer.step() at {site_of(train_unevenly, '# uneven step')}\n"
    for outcome in outcomes(train_unevenly, kind, strategy, backend=backend, ranks=2):
        assert isinstance(outcome.error, MismatchError), outcome.traceback
        text = str(outcome.error)
        assert f"rank 0: {step if kind == 'step' else backward}" in text
        assert f"rank 1: {backward if kind == 'step' else step}" in text
        assert "inside: average of gradients" in text
        assert "world.agree" in text


def save_alone(folder: str) -> None:
    world = shoal.world()
    model = shoal.as_distributed(nn.Linear(2, 2), strategy="ddp")
    if world.rank == 0:
        shoal.save(folder, model)  # alone against a barrier
    else:
        world.barrier()  # without a save


@pytest.mark.parametrize("backend", ["shm", "gloo", "memory"])
def test_the_call_comes_first_and_what_it_does_inside_second(backend: str, tmp_path: Path) -> None:
    save = site_of(save_alone, "# alone against a barrier")
    barrier = site_of(save_alone, "# without a save")
    for outcome in outcomes(save_alone, str(tmp_path), backend=backend, ranks=2):
        assert isinstance(outcome.error, MismatchError), outcome.traceback
        first, call, inside, other, _ = str(outcome.error).splitlines()
        assert first.startswith("the ranks made different calls")
        assert call == f"  rank 0: shoal.save() at {save}"
        assert inside.startswith("    inside: ")
        assert other == f"  rank 1: barrier() at {barrier}"


# Who is not part of it --------------------------------------------------------------------------


def a_pair_apart() -> str:
    hurry()
    world = shoal.world()
    pair = world.subgroup([0, 1])
    if world.rank == 2:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:  # computes
            torch.ones(100).sum()
        world.barrier()
        return "done"
    if world.rank == 0:
        world.backend.recv(src=1)
    assert pair is not None
    pair.barrier()
    return "done"


def test_ranks_that_compute_hear_of_it_when_they_call() -> None:
    results = outcomes(a_pair_apart, backend="shm", ranks=3)
    assert_deadlock(results[:2], "rank 0 in world.recv()", "rank 1 in group.barrier()")
    assert "rank 2" not in str(results[0].error)
    assert isinstance(results[2].error, PeerError), results[2].traceback
    assert "ranks wait for each other" in str(results[2].error)

"""Deadlocks of ranks in memory are known the moment they are there, not at a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
import torch

import shoal
from faults.worlds import SOON_S, outcomes, site_of
from shoal.errors import DeadlockError, PeerError


def both_send() -> None:
    world = shoal.world()
    world.send(torch.ones(1), dst=1 - world.rank)  # stuck
    world.recv(src=1 - world.rank)


def both_receive() -> None:
    world = shoal.world()
    world.recv(src=1 - world.rank)  # stuck
    world.send(torch.ones(1), dst=1 - world.rank)


def another_tag() -> None:
    world = shoal.world()
    if world.rank == 0:
        world.send(torch.ones(1), dst=1, tag=1)
    else:
        world.recv(src=0, tag=2)


def two_groups_in_opposite_order() -> None:
    world = shoal.world()
    groups = [world.subgroup([0, 1]), world.subgroup([0, 1])]
    for group in groups if world.rank == 0 else reversed(groups):
        group.all_reduce(torch.ones(1))  # stuck


def group_and_world_in_opposite_order() -> None:
    world = shoal.world()
    group = world.subgroup([0, 1])
    for each in (world, group) if world.rank == 0 else (group, world):
        each.barrier()


def asynchronous_waits() -> None:
    world = shoal.world()
    works = [world.recv(src=1 - world.rank, tag=tag, async_op=True) for tag in range(2)]
    for work in works:
        work.wait()


DEADLOCKS = [
    both_send,
    both_receive,
    another_tag,
    two_groups_in_opposite_order,
    group_and_world_in_opposite_order,
    asynchronous_waits,
]


@pytest.mark.parametrize("deadlock", DEADLOCKS)
def test_known_at_once(deadlock: Callable[[], None]) -> None:
    begin = time.monotonic()
    results = outcomes(deadlock, backend="memory", ranks=2, timeout=600)
    assert time.monotonic() - begin < SOON_S
    assert isinstance(results[0].error or results[1].error, DeadlockError)
    for outcome in results:
        # The first to be woken raises, and its failure reaches the rest.
        assert isinstance(outcome.error, DeadlockError | PeerError), outcome.traceback


def test_the_report_says_who_waits_for_whom() -> None:
    results = outcomes(both_send, backend="memory", ranks=2, timeout=600)
    report = next(str(o.error) for o in results if isinstance(o.error, DeadlockError))
    site = site_of(both_send, "# stuck")
    for rank in (0, 1):
        assert (
            f"rank {rank} waits for rank {1 - rank} in send(float32[1], dst={1 - rank})" in report
        )
    assert report.count(site) == 2


def a_cycle() -> None:
    world = shoal.world()
    world.recv(src=(world.rank + 1) % world.size)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_cycle_of_many(ranks: int) -> None:
    results = outcomes(a_cycle, backend="memory", ranks=ranks, timeout=600)
    report = next(str(o.error) for o in results if isinstance(o.error, DeadlockError))
    for rank in range(ranks):
        assert f"rank {rank} waits for rank {(rank + 1) % ranks}" in report


def a_pair_apart() -> str:
    world = shoal.world()
    if world.rank < 2:
        world.recv(src=1 - world.rank)
    return "done"


def test_ranks_that_are_not_part_of_it_finish_first() -> None:
    results = outcomes(a_pair_apart, backend="memory", ranks=4, timeout=600)
    assert [outcome.value for outcome in results[2:]] == ["done", "done"]
    assert any(isinstance(outcome.error, DeadlockError) for outcome in results[:2])
    assert all(outcome.failed for outcome in results[:2])


def caught_and_resolved() -> float:
    world = shoal.world()
    with contextlib.suppress(DeadlockError):
        world.recv(src=1 - world.rank, tag=9)
    return world.all_reduce(torch.ones(1)).item()


def test_whoever_catches_it_can_go_on() -> None:
    results = outcomes(caught_and_resolved, backend="memory", ranks=2, timeout=600)
    assert [outcome.value for outcome in results] == [2.0, 2.0]

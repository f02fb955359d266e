"""Processes that come and go: a bare loop of collectives goes on whatever happens to its ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import LaunchError, MembershipChanged, PeerError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.meeting.elastic_options import Elastic

TIMEOUT_S = 40.0
Deed = Callable[[int], None]
BACKENDS = ("shm", "gloo")


@pytest.fixture(autouse=True, scope="module")
def server_is_up() -> None:
    """What starts the ranks outlives a test."""
    fork_server()


def person() -> int:
    return int(os.environ["SHOAL_PERSON"])


def counted(step: int) -> float:
    """A step of what is no training, but breaks like one."""
    world = shoal.world()
    total = world.all_reduce(torch.full((300,), float(step)))[7].item()
    assert total == step * world.size
    return total


def go_on(deed: Deed, steps: int, size: int) -> Any:
    """Counts to ``steps`` among ``size`` ranks or fewer; deeds are done at their steps."""
    world, step, losses = shoal.world(), 0, 0
    membership = world.membership
    assert membership is not None
    if membership.generation == 0:
        membership.regroup()
    while True:
        try:
            # All of a world end together: one that has just come hears here how far the others are.
            step = max(world.all_gather_object(step))
            if step >= steps and world.size >= size:
                break
            deed(step)
            counted(step)
            step += 1
            if world.agree(membership.wants_change()):
                membership.regroup()
        except MembershipChanged:
            losses += 1
            membership.regroup()
    return world.rank, world.size, membership.generation, losses


def run(deed: Deed, ranks: int, backend: str, steps: int = 8, size: int = 1, **options: Any) -> Any:
    elastic = Elastic(**options)
    args = (deed, steps, size)
    return shoal.run(go_on, ranks, backend, args=args, timeout=TIMEOUT_S, elastic=elastic)


def kill(*persons: int, at: int = 3, by: int = signal.SIGKILL) -> Deed:
    def deed(step: int) -> None:
        if step == at and person() in persons:
            os.kill(os.getpid(), by)

    return deed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_without_one_that_was_killed(backend: str, victim: int) -> None:
    found = run(kill(victim), 3, backend)
    assert [each[:3] for each in found] == [(0, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"spares": 1}, {"restarts": 1}], ids=["spare", "restart"])
def test_another_takes_its_place(backend: str, options: dict[str, int]) -> None:
    found = run(kill(1), 3, backend, size=3, **options)
    assert [each[:2] for each in found] == [(0, 3), (1, 3), (2, 3)]
    assert sorted(each[3] for each in found) == [0, 1, 1]  # one came after the loss


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_at_once(backend: str) -> None:
    assert [each[:2] for each in run(kill(0, 2), 4, backend)] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_is_killed_while_all_regroup(backend: str) -> None:
    def deed(step: int) -> None:
        kill(1)(step)
        if step == 3 and person() == 2:
            membership: Any = shoal.world().membership

            def die(world: Any) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            membership._connect = die

    assert [each[:2] for each in run(deed, 4, backend)] == [(0, 2), (1, 2)]


def test_one_that_is_stopped_is_killed_and_the_others_go_on() -> None:
    found = run(kill(1, by=signal.SIGSTOP), 3, "shm")
    assert [each[:2] for each in found] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sigterm_is_a_request_to_leave_at_the_end_of_the_step(backend: str) -> None:
    found = run(kill(1, by=signal.SIGTERM), 3, backend, restarts=1)
    assert [each[1:] for each in found] == [(2, 2, 0)] * 2  # nobody was lost, nobody replaced


def test_a_run_inside_of_a_rank_is_a_run_of_its_own() -> None:
    def outer() -> Any:
        return shoal.run(lambda: shoal.world().membership is None, 2, "shm", timeout=TIMEOUT_S)

    assert shoal.run(outer, 1, "shm", timeout=TIMEOUT_S, elastic=Elastic()) == [[True, True]]


def test_too_few_end_the_run_with_what_it_failed_of() -> None:
    def deed(step: int) -> None:
        if step == 3 and shoal.world().rank == 1:
            raise ValueError("the loss is nan")

    with pytest.raises(ValueError, match="the loss is nan") as caught:
        run(deed, 2, "shm", min_ranks=2, restarts=1, size=2)
    assert "raised on rank" in "".join(caught.value.__notes__)


def test_a_killed_one_too_few_is_named() -> None:
    with pytest.raises(PeerError, match=r"rank 1 failed: .*killed by signal 9"):
        run(kill(1), 2, "shm", min_ranks=2)


def test_bounds_that_cannot_be_are_an_error_of_all() -> None:
    def ask() -> None:
        membership = shoal.world().membership
        assert membership is not None
        membership.require(5, None)

    with pytest.raises(LaunchError, match="min_ranks=5, but there are 2 ranks"):
        shoal.run(ask, 2, "shm", timeout=TIMEOUT_S, elastic=Elastic())


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_worlds_leave_nothing_behind(backend: str) -> None:
    def regroup_often() -> tuple[Any, Any]:
        membership: Any = shoal.world().membership

        def held() -> tuple[int, int, int]:
            maps = Path("/proc/self/maps").read_text().count("memfd:shoal")
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

        for _ in range(3):
            membership.regroup()
            counted(1)
        before = held()
        for _ in range(47):
            membership.regroup()
            counted(1)
        return before, held()

    for before, after in shoal.run(regroup_often, 2, backend, timeout=TIMEOUT_S, elastic=Elastic()):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)

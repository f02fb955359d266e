"""Two threads of one rank: in turns they may call operations of a group, at once they may not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import pools
import shoal
from shoal.errors import ClosedError, PeerError, ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server

TEAMS = [pools.Team("shm", 2), pools.Team("gloo", 2), pools.Team("shm", 3)]
between_processes = pytest.mark.parametrize("team", TEAMS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def forks_quickly() -> None:
    """It outlives the tests."""
    fork_server()


def start(task: Any, name: str) -> threading.Thread:
    thread = threading.Thread(target=task, name=name, daemon=True)
    thread.start()
    return thread


def call_at_once() -> dict[str, str]:
    """On rank 0 a second thread comes while the first one waits for rank 1, which never calls."""
    world, errors = shoal.world(), {}

    def reduce() -> None:
        try:
            world.all_reduce(torch.ones(3))
        except ShoalError as error:
            errors[threading.current_thread().name] = f"{type(error).__name__}: {error}"

    if world.rank == 1:
        try:
            world.recv(src=0)  # which sends nothing
        except PeerError as error:
            errors["peer"] = str(error)
        return errors
    first = start(reduce, "first")
    while not world.backend._coordination._lock.locked():
        time.sleep(0.001)
    start(reduce, "second").join()
    first.join()
    return errors


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_at_once_is_an_error_on_all_ranks(backend: str) -> None:
    here, there = shoal.run(call_at_once, 2, backend, timeout=30)
    assert "ShoalError: threads 'first' and 'second' of this rank" in here["second"]
    assert "the world at the same time" in here["second"]
    assert "a group of its own" in here["second"]
    assert "first" in here  # it does not wait for a world that has failed
    assert "rank 0 failed" in there["peer"]
    assert "threads 'first' and 'second'" in there["peer"]


def take_turns() -> list[float]:
    """One thread after the other, and two at once that have a group each."""
    world, found = shoal.world(), []
    lock = threading.Lock()

    def reduce(group: Any, value: float) -> None:
        for _ in range(20):
            total = group.all_reduce(torch.tensor([value])).item()
            with lock:
                found.append(total / value)

    for value in (1.0, 2.0):
        start(lambda value=value: reduce(world, value), "alone").join()
    values = {value: world.subgroup(range(world.size)) for value in (1.0, 2.0)}
    both = [start(lambda v=v, g=g: reduce(g, v), "both") for v, g in values.items()]
    for thread in both:
        thread.join()
    return found


@between_processes
def test_turns_and_groups_of_their_own_are_fine(team: pools.Team) -> None:
    for found in team.run(take_turns):
        assert found == [float(team.size)] * 80


def ask_in_a_thread() -> str:
    """What a thread that is no rank is told."""
    texts: list[str] = []

    def ask() -> None:
        try:
            shoal.world()
        except ClosedError as error:
            texts.append(str(error))

    start(ask, "helper").join()
    return texts[0]


def test_a_thread_that_is_no_rank_is_told_so() -> None:
    assert "thread 'helper' is no rank" in shoal.run(ask_in_a_thread, 2, "memory")[0]

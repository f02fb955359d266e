"""Threads that a rank over memory has started: an error that says what to do, and no wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from faults.worlds import site_of
from shoal.errors import DeadlineError, ShoalError


def in_threads(count: int, act: Callable[[], Any]) -> list[str]:
    """What came of it in each."""
    said = [""] * count

    def try_it(number: int) -> None:
        try:
            act()
            said[number] = "no error"
        except ShoalError as error:
            said[number] = f"{type(error).__name__}: {error}"

    names = [f"user-{number}" for number in range(count)]
    threads = [
        threading.Thread(target=try_it, args=(number,), name=name)
        for number, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def call_from_threads() -> tuple[list[str], float]:
    world = shoal.world()
    said = in_threads(4, lambda: world.all_reduce(torch.ones(1)))  # here
    return said, world.all_reduce(torch.ones(1)).item()


def test_four_threads_are_told() -> None:
    results = shoal.run(call_from_threads, 2, "memory", timeout=30)
    for rank, (said, total) in enumerate(results):
        assert total == 2.0, "the refused calls count for nothing"
        for number, text in enumerate(said):
            assert f"thread 'user-{number}' of rank {rank} called all_reduce(float32[1]" in text
            assert site_of(call_from_threads, "# here") in text
            assert "use backend='shm'" in text


def other_calls(name: str) -> list[str]:
    world = shoal.world()
    posted = world.all_reduce(torch.ones(1), async_op=True) if world.rank == 0 else None
    acts: dict[str, Callable[[], Any]] = {
        "send": lambda: world.send(torch.ones(1), dst=1 - world.rank),
        "recv": lambda: world.recv(src=1 - world.rank),
        "barrier": world.barrier,
        "wait": lambda: posted is not None and posted.wait(),
        "split": lambda: world.split(0),
    }
    said = in_threads(1, acts[name]) if world.rank == 0 else []
    if posted is None:
        world.all_reduce(torch.ones(1))
    else:
        posted.wait()
    return said


@pytest.mark.parametrize("name", ["send", "recv", "barrier", "wait", "split"])
def test_other_calls(name: str) -> None:
    ((said,), _) = shoal.run(other_calls, 2, "memory", args=(name,), timeout=30)
    assert said.startswith("ShoalError: thread 'user-0' of rank 0 called ")


def leave_it_to_the_thread() -> None:
    world = shoal.world()
    if world.rank == 0:
        (said,) = in_threads(1, world.barrier)
        raise ValueError(said)
    world.barrier()


def test_the_others_do_not_wait() -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="only the rank's own thread has one"):
        shoal.run(leave_it_to_the_thread, 3, "memory", timeout=60)
    assert time.monotonic() - begin < 30


def alone() -> float:
    return float(in_threads(1, lambda: shoal.world) == ["no error"])


def test_threads_that_do_not_communicate_are_nobodys_business() -> None:
    assert shoal.run(alone, 2, "memory") == [1.0, 1.0]


def lose_a_turn() -> None:
    world = shoal.world()
    if world.rank == 0:  # as if another thread had taken it
        world.backend._simulator._turns[0].release = lambda: None
    world.barrier()


def test_a_lost_turn_ends_at_the_deadline() -> None:
    with pytest.raises(DeadlineError, match="rank 0 waits"):
        shoal.run(lose_a_turn, 2, "memory", timeout=1.0)

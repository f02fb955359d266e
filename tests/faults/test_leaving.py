"""A rank returns early, or shuts its world down: whoever waits for it is told."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from faults.gate import Gate
from faults.worlds import (
    ALL,
    MOST,
    SOON_S,
    assert_blames,
    outcomes,
    outcomes_between_hosts,
    timed,
    values,
    world,
)
from shoal.comm.shm import segments
from shoal.comm.world import World
from shoal.errors import ClosedError
from shoal.system.public_call import stack

WAITS = ["barrier", "all_reduce", "recv", "send", "async"]


def wait(how: str) -> Any:
    world = shoal.world()
    if how == "barrier":
        return world.barrier()
    if how == "all_reduce":
        return world.all_reduce(torch.ones(3))
    if how == "async":
        return world.all_reduce(torch.ones(3), async_op=True).wait()
    return world.recv(src=1) if how == "recv" else world.send(torch.ones(3), dst=1)


def leave_early(how: str, *, by_shutdown: bool) -> str:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        if by_shutdown:
            world.shutdown()
        return "left"
    with timed():
        wait(how)
    return "stayed"


def assert_told(results: list[Any], ranks: int) -> None:
    assert (results[1].value, results[1].error) == ("left", None)
    for rank in {*range(ranks)} - {1}:
        assert_blames(results[rank], 1, "left")
        assert results[rank].error.seconds < SOON_S


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [world("memory", 3), world("shm", 3), world("gloo", 2, full=True), world("mpi", 2, full=True)],
)
def test_a_rank_that_returns_early_is_named(backend: str, ranks: int, how: str) -> None:
    results = outcomes(lambda: leave_early(how, by_shutdown=False), backend=backend, ranks=ranks)
    assert_told(results, ranks)


@pytest.mark.parametrize(("backend", "ranks"), ALL)
def test_a_rank_that_shuts_down_early_is_named(backend: str, ranks: int) -> None:
    run = lambda: leave_early("all_reduce", by_shutdown=True)  # noqa: E731
    assert_told(outcomes(run, backend=backend, ranks=ranks), ranks)


def leave_a_group() -> None:
    world = shoal.world()
    group = world.subgroup([0, 1])
    if world.rank == 0:
        group.barrier()


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_only_those_who_wait_are_told(backend: str, ranks: int) -> None:
    """Ranks that need nothing of the one that left end well, before it or after it."""
    results = outcomes(leave_a_group, backend=backend, ranks=ranks)
    assert_blames(results[0], 1, "left")
    assert not any(outcome.failed for outcome in results[1:])


def one_call_more() -> None:
    world = shoal.world()
    for _ in range(3 if world.rank == 1 else 2):
        world.all_reduce(torch.ones(2))


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_one_call_more_than_the_others_is_an_error(backend: str, ranks: int) -> None:
    results = outcomes(one_call_more, backend=backend, ranks=ranks)
    assert results[1].error is not None
    assert_blames(results[1], results[1].error.rank, "left")
    assert not any(outcome.failed for outcome in results if outcome.rank != 1)


def uneven_ends() -> float:
    world = shoal.world()
    work = world.all_reduce(torch.ones(1000), async_op=True)
    if world.rank == 0:
        world.send(torch.full((3,), 7.0), dst=1)
        return work.wait()[0].item()
    if world.rank == 1:
        work.wait()
        return world.recv(src=0)[0].item()
    return 0.0  # never waits for its work: leaving finishes it


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_leaving_finishes_what_was_started(backend: str, ranks: int) -> None:
    results = values(outcomes(uneven_ends, backend=backend, ranks=ranks))
    assert results == [float(ranks), 7.0, *[0.0] * (ranks - 2)]


def leave_while_another_reads(gate: Gate) -> list[int]:
    """Rank 1 looks for the others' memory only when they have left, or try to for a while."""
    world = shoal.world()
    if world.rank == 1:
        open_memory = segments.Peer._map

        def open_late(*args: Any) -> Any:
            with contextlib.suppress(TimeoutError):
                gate.wait(seconds=0.5)
            return open_memory(*args)

        segments.Peer._map = open_late
    found = world.all_gather(torch.tensor([world.rank])).tolist()
    world.shutdown()
    gate.open()
    return found


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 3)])
def test_leaving_takes_nothing_along_that_others_need(backend: str, ranks: int, gate: Gate) -> None:
    results = outcomes(leave_while_another_reads, gate, backend=backend, ranks=ranks)
    assert values(results) == [[0, 1, 2]] * ranks


def use_after_shutdown() -> None:
    world = shoal.world()
    backend = world.backend
    world.shutdown()
    world.shutdown()
    with pytest.raises(ClosedError, match="shut down"):
        backend.all_reduce(torch.ones(1))
    with pytest.raises(ClosedError, match="shut down"):
        backend.send(torch.ones(1), dst=(backend.rank + 1) % backend.size)
    with pytest.raises(ClosedError, match=r"call shoal.init\(\) first"):
        shoal.world()


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_a_world_that_was_shut_down_says_so(backend: str, ranks: int) -> None:
    values(outcomes(use_after_shutdown, backend=backend, ranks=ranks))


CALLS: dict[str, Callable[[World], object]] = {
    "send": lambda world: world.send(torch.ones(3), dst=1),
    "recv": lambda world: world.recv(src=1),
    "all_reduce": lambda world: world.all_reduce(torch.ones(3)),
}


def leave_with_a_thread_in(how: str, gate: Gate) -> str:
    """Rank 0 leaves while a thread of its own waits for rank 1, which never comes."""
    world, errors = shoal.world(), list[BaseException]()
    if world.rank == 1:
        gate.wait()
        return ""

    def call() -> None:
        try:
            CALLS[how](world)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    frames = lambda: sys._current_frames().get(thread.ident or 0)  # noqa: E731
    while not any(each.f_code.co_name in ("pause", "collect") for each in stack(frames())):
        time.sleep(0.001)
    world.shutdown()
    thread.join(30)
    gate.open()
    (error,) = errors
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("how", [*CALLS])
@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 2)])
def test_a_thread_that_still_waits_is_told_that_its_rank_has_left(
    backend: str, ranks: int, how: str, gate: Gate
) -> None:
    results = values(outcomes(leave_with_a_thread_in, how, gate, backend=backend, ranks=ranks))
    assert results[0].startswith("ClosedError: this world was shut down")


def test_a_thread_that_still_waits_between_hosts(gate: Gate) -> None:
    results = values(outcomes_between_hosts(leave_with_a_thread_in, "send", gate, ranks=2))
    assert results[0].startswith("ClosedError: this world was shut down")

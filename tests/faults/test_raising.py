"""A rank raises: the others learn which one, why and where, wherever they are."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch

import shoal
from faults.gate import Gate
from faults.worlds import (
    ALL,
    MOST,
    SOON_S,
    TIMEOUT_S,
    all_pids,
    assert_all_blame,
    assert_blames,
    assert_prompt,
    outcomes,
    site_of,
    still_running,
    timed,
    world,
)
from shoal.comm import ReduceOp
from shoal.comm.operation import AllReduce
from shoal.comm.shm import segments
from shoal.comm.world import World
from shoal.errors import PeerError

Wait = Callable[[World], Any]


def in_barrier(world: World) -> None:
    world.barrier()


def in_all_reduce(world: World) -> None:
    world.all_reduce(torch.ones(5))


def in_large_all_reduce(world: World) -> None:
    world.all_reduce(torch.ones(1 << 20))


def in_async_all_reduce(world: World) -> None:
    world.all_reduce(torch.ones(5), async_op=True).wait()


def in_recv(world: World) -> None:
    world.recv(src=1)


def in_send(world: World) -> None:
    world.send(torch.ones(2), dst=1)


def in_objects(world: World) -> None:
    world.all_gather_object({"rank": world.rank})


def in_split(world: World) -> None:
    world.split(0)


WAITS = [
    in_barrier,
    in_all_reduce,
    in_large_all_reduce,
    in_async_all_reduce,
    in_recv,
    in_send,
    in_objects,
    in_split,
]


def raise_before(wait: Wait) -> None:
    world = shoal.world()
    if world.rank == 1:
        raise ValueError("boom before all")
    wait(world)


@pytest.mark.parametrize(("backend", "ranks"), ALL)
def test_before_the_first_operation(backend: str, ranks: int) -> None:
    results = outcomes(raise_before, in_barrier, backend=backend, ranks=ranks)
    assert str(results[1].error) == "boom before all"
    site = site_of(raise_before, "raise ValueError")
    assert_all_blame(results, 1, f"ValueError: boom before all ({site})")


def raise_between(wait: Wait) -> None:
    world = shoal.world()
    world.all_reduce(torch.ones(3))
    world.barrier()  # whoever is past it has its sum
    if world.rank == 1:
        raise KeyError("boom between")
    with timed():
        wait(world)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [world("memory", 3), world("shm", 2), world("gloo", 3, full=True), world("mpi", 3, full=True)],
)
def test_while_the_others_wait_anywhere(backend: str, ranks: int, wait: Wait) -> None:
    results = outcomes(raise_between, wait, backend=backend, ranks=ranks)
    assert isinstance(results[1].error, KeyError)
    site = site_of(raise_between, "raise KeyError")
    assert_all_blame(results, 1, f"KeyError: 'boom between' ({site})")
    waited = site_of(wait, "world.")
    for outcome in results[:1] + results[2:]:
        assert outcome.error.seconds < SOON_S
        assert waited in outcome.error.context, outcome.error


def raise_inside(mistake: Wait) -> None:
    world = shoal.world()
    world.barrier()
    mistake(world)
    world.barrier()


def bad_root(world: World) -> None:
    world.broadcast(torch.ones(4), root=0 if world.rank != 1 else 99)


def bad_out_dtype(world: World) -> None:
    out = torch.empty(2 * world.size, dtype=torch.int32 if world.rank == 1 else torch.float32)
    world.all_gather(torch.ones(2), out=out)


def bad_scatter_out(world: World) -> None:
    out = torch.empty(3 if world.rank == 1 else 2)
    world.scatter(torch.ones(2 * world.size) if world.rank == 0 else None, out=out)


def bad_reduce_scatter_out(world: World) -> None:
    out = torch.empty(7 if world.rank == 1 else 2)
    world.reduce_scatter(torch.ones(2 * world.size), out=out)


def bad_tensor(world: World) -> None:
    world.all_reduce([1.0, 2.0] if world.rank == 1 else torch.ones(2))


def bad_op(world: World) -> None:
    world.all_reduce(torch.ones(2), "median" if world.rank == 1 else "sum")


@pytest.mark.parametrize(
    "mistake",
    [bad_root, bad_out_dtype, bad_scatter_out, bad_reduce_scatter_out, bad_tensor, bad_op],
)
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [world("memory", 2), world("shm", 3), world("gloo", 2, full=True), world("mpi", 2, full=True)],
)
def test_inside_an_operation(backend: str, ranks: int, mistake: Wait) -> None:
    results = outcomes(raise_inside, mistake, backend=backend, ranks=ranks)
    assert results[1].error is not None
    assert not isinstance(results[1].error, shoal.errors.ShoalError), results[1].traceback
    name = type(results[1].error).__name__
    assert_all_blame(results, 1, name, mistake.__code__.co_filename)


def raise_with_work_under_way() -> None:
    world = shoal.world()
    works = [world.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
    if world.rank == 1:
        raise RuntimeError("boom with work under way")
    works += [world.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
    with timed():
        for work in works:
            work.wait()


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_with_asynchronous_work_under_way(backend: str, ranks: int) -> None:
    results = outcomes(raise_with_work_under_way, backend=backend, ranks=ranks)
    assert_all_blame(results, 1, "RuntimeError: boom with work under way")


def in_small_all_reduce(world: World) -> None:
    world.all_reduce(torch.ones(10))


def in_pending_all_reduce(world: World) -> None:
    work = world.backend.start(AllReduce(world.backend.empty(1 << 16), ReduceOp.SUM))
    if world.rank == 0:
        work.wait()


def raise_before_memory_is_mapped(call: Wait) -> None:
    world = shoal.world()
    if world.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments.Peer, "_map", partialmethod(_map_too_late, segments.Peer._map))
            call(world)
    call(world)
    raise RuntimeError("boom and gone")


def _map_too_late(peer: segments.Peer, map_now: Wait, location: segments.Location) -> Any:
    if peer._pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(peer._pid)
            assert select.select([end], [], [], TIMEOUT_S)[0]
            os.close(end)
    return map_now(peer, location)


@pytest.mark.parametrize("call", [in_small_all_reduce, in_pending_all_reduce])
def test_before_its_memory_was_mapped(call: Wait) -> None:
    """It has shown where its data is, and is gone before anybody has looked."""
    results = outcomes(raise_before_memory_is_mapped, call, backend="shm", ranks=2)
    assert_all_blame(results, 1, "RuntimeError: boom and gone")


def raise_in_async_operation() -> None:
    world = shoal.world()
    out = torch.empty(5 if world.rank == 1 else 2)
    source = torch.ones(2 * world.size) if world.rank == 0 else None
    work = world.scatter(source, out=out, async_op=True)
    work.wait()
    world.barrier()


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_inside_an_asynchronous_operation(backend: str, ranks: int) -> None:
    results = outcomes(raise_in_async_operation, backend=backend, ranks=ranks)
    assert isinstance(results[1].error, ValueError)
    assert_all_blame(results, 1, "ValueError: out must be", __file__)


def raise_in_a_group() -> None:
    world = shoal.world()
    group = world.subgroup([0, 1])
    if group is not None:
        group.all_reduce(torch.ones(2))
        if world.rank == 1:
            raise ValueError("boom in the group")
        group.barrier()
    world.barrier()


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_in_a_group_while_others_wait_in_the_world(backend: str, ranks: int) -> None:
    results = outcomes(raise_in_a_group, backend=backend, ranks=ranks)
    assert_all_blame(results, 1, "ValueError: boom in the group")


def raise_outside_a_group() -> None:
    world = shoal.world()
    group = world.subgroup([0, 1])
    if group is None:
        raise ValueError("boom outside the group")
    if world.rank == 0:
        group.recv(src=1)  # which waits for the world
    world.barrier()


@pytest.mark.parametrize(
    ("backend", "ranks"), [world("memory", 3), world("shm", 3), world("gloo", 3, full=True)]
)
def test_outside_a_group_that_waits_within(backend: str, ranks: int) -> None:
    results = outcomes(raise_outside_a_group, backend=backend, ranks=ranks)
    assert_all_blame(results, 2, "ValueError: boom outside the group")


def raise_one_after_another() -> None:
    world = shoal.world()
    pids = all_pids()
    if world.rank == 1:
        raise ValueError("the first")
    try:
        world.barrier()
    except PeerError as error:
        if pids[1] != os.getpid():  # a process, whose end can be awaited
            assert still_running([pids[1]]) == []
        raise RuntimeError(f"the {world.rank}th, after {error.rank}") from error


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_the_first_to_fail_is_the_one_that_is_shown(backend: str, ranks: int) -> None:
    """Also when others fail after it with errors of their own."""
    with pytest.raises(ValueError, match="the first") as caught:
        shoal.run(raise_one_after_another, ranks, backend, timeout=TIMEOUT_S)
    assert any("raised on rank 1" in note for note in caught.value.__notes__)


def fail_in_order(gate: Gate) -> None:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        raise ValueError("the first")
    if world.rank == 0:
        try:
            world.barrier()
        except PeerError:
            raise RuntimeError("the second") from None
        finally:
            gate.open()
    gate.wait()
    world.barrier()


@pytest.mark.parametrize(
    ("backend", "ranks"), [world("shm", 3), world("gloo", 3), world("mpi", 3, full=True)]
)
def test_the_first_to_fail_is_named_to_whoever_asks_late(
    backend: str, ranks: int, gate: Gate
) -> None:
    results = outcomes(fail_in_order, gate, backend=backend, ranks=ranks)
    assert str(results[0].error) == "the second"
    assert_blames(results[2], 1, "ValueError: the first")


def raise_while_another_computes(gate: Gate) -> None:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        raise ValueError("boom")
    if world.rank == 0:
        try:
            world.barrier()
        finally:
            gate.open()
    gate.wait()  # a long computation: it ends well after the failure
    with timed():
        world.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 3), world("gloo", 3)])
def test_whoever_computes_learns_at_its_next_call(backend: str, ranks: int, gate: Gate) -> None:
    results = outcomes(raise_while_another_computes, gate, backend=backend, ranks=ranks)
    assert_all_blame(results, 1, "ValueError: boom")
    assert results[2].error.seconds < SOON_S


def exit_in_a_rank(code: object) -> None:
    world = shoal.world()
    if world.rank == 1:
        raise SystemExit(code)
    world.barrier()


@pytest.mark.parametrize(("backend", "ranks"), [world("memory", 2), world("shm", 2)])
def test_sys_exit_counts_as_a_failure(backend: str, ranks: int) -> None:
    results = outcomes(exit_in_a_rank, "had enough", backend=backend, ranks=ranks)
    assert_all_blame(results, 1, "SystemExit: had enough")


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_the_caller_is_told_who_exited_and_who_waited(backend: str) -> None:
    with pytest.raises(PeerError, match=r"rank 1 failed: it ended by SystemExit\(0\)") as caught:
        shoal.run(exit_in_a_rank, 2, backend, (0,))
    site = site_of(exit_in_a_rank, "world.barrier()")
    assert "before the end of the function" in str(caught.value)
    assert re.search(rf"while rank 0 waited for it in .*{site}", caught.value.__notes__[0])


class Awkward(Exception):
    """Cannot be rebuilt from its arguments, and its text is long and not ASCII."""

    def __init__(self, number: int, *, text: str) -> None:
        super().__init__(text)


def raise_awkwardly() -> None:
    world = shoal.world()
    if world.rank == 1:
        raise Awkward(1, text="Größe ≠ 3 " * 3000)
    world.barrier()


@pytest.mark.parametrize(
    ("backend", "ranks"), [world("memory", 2), world("shm", 2), world("gloo", 2)]
)
def test_an_exception_that_hardly_travels(backend: str, ranks: int) -> None:
    results = outcomes(raise_awkwardly, backend=backend, ranks=ranks)
    assert_all_blame(results, 1, "Awkward: Größe ≠ 3 Größe")
    assert "Größe" in str(results[1].error)
    assert_prompt(results)

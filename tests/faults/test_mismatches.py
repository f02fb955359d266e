"""Ranks that call different things: all of them are told who called what, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from faults.worlds import ALL, outcomes, site_of, values, world
from shoal.comm.world import World
from shoal.errors import MismatchError, PeerError

Case = Callable[[World, Tensor], Any]
# In each case the line of `if world.rank == 1` is what rank 1 calls, the last what others call.


def operation(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_gather(tensor)  # rank 1
    return world.all_reduce(tensor)  # others


def reduce_op(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_reduce(tensor, "max")  # rank 1
    return world.all_reduce(tensor, "sum")  # others


def root(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.broadcast(tensor, root=1)  # rank 1
    return world.broadcast(tensor, root=0)  # others


def root_of_reduce(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.reduce(tensor, root=1)  # rank 1
    return world.reduce(tensor, root=0)  # others


def length(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_reduce(tensor[:3])  # rank 1
    return world.all_reduce(tensor)  # others


def shape(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_reduce(tensor.view(2, 3))  # rank 1
    return world.all_reduce(tensor.view(3, 2))  # others


def shape_of_broadcast(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.broadcast(tensor[:5], root=0)  # rank 1
    return world.broadcast(tensor, root=0)  # others


def row_shape(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_gather(tensor.view(2, 3))  # rank 1
    return world.all_gather(tensor.view(3, 2))  # others


def dtype(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_reduce(tensor.view(torch.int32))  # rank 1
    return world.all_reduce(tensor)  # others


def dtype_of_broadcast(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.broadcast(tensor.view(torch.int32))  # rank 1
    return world.broadcast(tensor)  # others


def sizes(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.reduce_scatter(tensor, sizes=[0] * (world.size - 1) + [6])  # rank 1
    return world.reduce_scatter(tensor, sizes=[6] + [0] * (world.size - 1))  # others


def sizes_or_none(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.reduce_scatter(tensor)  # rank 1
    return world.reduce_scatter(tensor, sizes=[6] + [0] * (world.size - 1))  # others


def room_for_a_gather(world: World, tensor: Tensor) -> Any:
    out = torch.empty(6 * world.size)
    if world.rank == 1:
        return world.all_gather(tensor, out=out[1:])  # rank 1
    return world.all_gather(tensor, out=out)  # others


def room_for_an_exchange(world: World, tensor: Tensor) -> Any:
    parts = [2] + [4] + [0] * (world.size - 2)
    if world.rank == 1:
        return world.all_to_all(tensor, out=torch.empty(1), sizes=parts)  # rank 1
    return world.all_to_all(tensor, sizes=parts)  # others


def tensor_or_object(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_gather_object([1, 2])  # rank 1
    return world.all_gather(tensor)  # others


def broadcast_of_tensor_or_object(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.broadcast_object(root=0)  # rank 1
    return world.broadcast(tensor, root=0)  # others


def barrier(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.barrier()  # rank 1
    return world.all_reduce(tensor)  # others


def asynchronous(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_reduce(tensor, "min", async_op=True).wait()  # rank 1
    return world.all_reduce(tensor, async_op=True).wait()  # others


def large(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.all_reduce(torch.ones(1 << 20))  # rank 1
    return world.all_reduce(torch.ones((1 << 20) + 1))  # others


def members(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.subgroup([1])  # rank 1
    return world.subgroup([0, 1])  # others


def group_or_none(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.barrier()  # rank 1
    return world.split(0)  # others


def size_of_message(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.recv(tensor[:5], src=0)  # rank 1
    return world.send(tensor, dst=1)  # others


def shape_of_message(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.recv(tensor.view(2, 3), src=0)  # rank 1
    return world.send(tensor, dst=1)  # others


def dtype_of_message(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.recv(tensor.view(torch.int32), src=0, tag=3)  # rank 1
    return world.send(tensor, dst=1, tag=3)  # others


def asynchronous_message(world: World, tensor: Tensor) -> Any:
    if world.rank == 1:
        return world.recv(tensor[1:], src=0, async_op=True).wait()  # rank 1
    return world.send(tensor, dst=1, async_op=True).wait()  # others


MESSAGES = [size_of_message, shape_of_message, dtype_of_message, asynchronous_message]
COLLECTIVES = [
    operation,
    reduce_op,
    root,
    root_of_reduce,
    length,
    shape,
    shape_of_broadcast,
    row_shape,
    dtype,
    dtype_of_broadcast,
    sizes,
    sizes_or_none,
    room_for_a_gather,
    room_for_an_exchange,
    tensor_or_object,
    broadcast_of_tensor_or_object,
    barrier,
    asynchronous,
    large,
    group_or_none,
]


def mismatch(cases: list[Case], sites: list[tuple[str, str]]) -> list[str]:
    """What is wrong with the errors of some mismatches, one after the other in one world."""
    world = shoal.world()
    problems = []
    for case, named in zip(cases, sites, strict=True):
        if case in MESSAGES and world.rank > 1:
            continue
        tensor = torch.arange(6.0) + world.rank
        before = tensor.clone()
        message = refusal(case, world, tensor)
        if not all(site in message for site in named):
            problems.append(f"{case.__name__}: names not {named}: {message}")
        if not torch.equal(tensor, before):
            problems.append(f"{case.__name__}: moved something: {tensor}")
    # Everybody was told, so everybody can go on.
    if world.all_reduce(torch.ones(2)).tolist() != [world.size] * 2:
        problems.append("the sum afterwards is wrong")
    if world.all_gather_object(world.rank) != list(range(world.size)):
        problems.append("the objects afterwards are wrong")
    return problems


def refusal(case: Case, world: World, tensor: Tensor) -> str:
    try:
        case(world, tensor)
    except MismatchError as error:
        return str(error)
    except Exception as error:
        return f"not a MismatchError but {error!r}"
    return "no error"


def run_cases(cases: list[Case], backend: str, ranks: int) -> None:
    sites = [(site_of(case, "# rank 1"), site_of(case, "# others")) for case in cases]
    results = outcomes(mismatch, cases, sites, backend=backend, ranks=ranks)
    assert values(results) == [[]] * ranks


@pytest.mark.parametrize("case", COLLECTIVES + MESSAGES)
@pytest.mark.parametrize(("backend", "ranks"), [world("memory", 2), world("shm", 3, full=True)])
def test_each(case: Case, backend: str, ranks: int) -> None:
    run_cases([case], backend, ranks)


@pytest.mark.parametrize(("backend", "ranks"), ALL)
def test_one_after_the_other_in_one_world(backend: str, ranks: int) -> None:
    """A mismatch that everybody caught leaves a world that works."""
    run_cases(COLLECTIVES + MESSAGES, backend, ranks)


def test_other_members_of_a_group() -> None:
    run_cases([members], "memory", 3)


def swap_order() -> tuple[str, str]:
    world = shoal.world()
    calls = [world.barrier, lambda: world.all_reduce(torch.ones(1))]
    messages = []
    for call in calls if world.rank == 1 else reversed(calls):
        with pytest.raises(MismatchError) as caught:
            call()
        messages.append(str(caught.value))
    world.barrier()
    return tuple(messages)


@pytest.mark.parametrize(("backend", "ranks"), [world("memory", 3), world("shm", 2)])
def test_another_order(backend: str, ranks: int) -> None:
    results = values(outcomes(swap_order, backend=backend, ranks=ranks))
    assert results == [results[0]] * ranks, "every rank comes to the same verdict"
    first, second = results[0]
    assert "called different operations as #1; nothing was moved" in first
    assert "called different operations as #2; nothing was moved" in second
    assert "rank 1: barrier() at" in first
    assert "rank 1: all_reduce(float32[1], op=sum) at" in second


def in_a_group() -> str:
    world = shoal.world()
    group = world.subgroup([0, 2])
    message = ""
    if group is not None:
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(torch.ones(1), "sum" if group.rank == 0 else "max")
        message = str(caught.value)
        assert group.all_reduce(torch.ones(1)).item() == 2.0
    world.barrier()
    return message


@pytest.mark.parametrize(("backend", "ranks"), [world("memory", 3), world("shm", 3)])
def test_in_a_group_the_ranks_of_the_world_are_named(backend: str, ranks: int) -> None:
    message = values(outcomes(in_a_group, backend=backend, ranks=ranks))[2]
    assert "rank 0: all_reduce(float32[1], op=sum)" in message
    assert "rank 2: all_reduce(float32[1], op=max)" in message


def uncaught() -> None:
    world = shoal.world()
    world.all_reduce(torch.ones(3 + world.rank))


@pytest.mark.parametrize(("backend", "ranks"), [world("memory", 2), world("shm", 3)])
def test_uncaught_it_ends_the_run_on_every_rank(backend: str, ranks: int) -> None:
    """The process lives to say so: no transport's own check has killed it."""
    results = outcomes(uncaught, backend=backend, ranks=ranks)
    assert all(isinstance(outcome.error, MismatchError) for outcome in results), results
    assert all(outcome.exit_code in (1, None) for outcome in results)
    with pytest.raises(MismatchError, match=r"all_reduce\(float32\[3\], op=sum\)"):
        shoal.run(uncaught, ranks, backend)


def catch_alone() -> float:
    world = shoal.world()
    tensor = torch.ones(1)
    try:
        world.all_reduce(tensor, "sum" if world.rank == 0 else "max")
    except MismatchError:
        if world.rank == 0:
            raise
    return world.all_reduce(tensor).item()


@pytest.mark.parametrize(("backend", "ranks"), [world("memory", 3), world("shm", 3)])
def test_whoever_catches_it_alone_learns_of_those_who_did_not(backend: str, ranks: int) -> None:
    results = outcomes(catch_alone, backend=backend, ranks=ranks)
    assert isinstance(results[0].error, MismatchError)
    for outcome in results[1:]:
        assert isinstance(outcome.error, PeerError), outcome.traceback
        assert outcome.error.rank == 0
        assert "MismatchError: " in outcome.error.reason

"""Operations that are shown now and carried out when a rank asks for them; memory in reach."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
import torch

import pools
import shoal
from shoal.comm import ReduceOp
from shoal.comm.operation import AllReduce, ReduceScatter
from shoal.comm.shm.pending import PendingOperation
from shoal.comm.work import ThreadedWork
from shoal.errors import DeadlineError, MismatchError, TransportError

backends = pytest.mark.parametrize("backend", ["memory", "shm", "gloo"])
LENGTH = 1001


def operation(number: int, buffer: torch.Tensor) -> Any:
    world = shoal.world()
    if number % 2:
        return AllReduce(buffer, ReduceOp.AVERAGE)
    return ReduceScatter(buffer, ReduceOp.SUM, None, None, (world.rank, world.size))


def many_at_once(count: int) -> list[list[float]]:
    """More than there are slots for, finished in another order than they were begun in."""
    backend = shoal.world().backend
    buffers = [backend.empty(LENGTH) for _ in range(count)]
    seen = []
    for turn in range(3):
        works = []
        for number, buffer in enumerate(buffers):
            buffer.fill_(backend.rank + number + turn)
            works.append(backend.start(operation(number, buffer)))
        results = {number: works[number].wait() for number in reversed(range(count))}
        backend.barrier()
        seen.append([results[number].unique().item() for number in range(count)])
    return seen


@backends
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_at_once(backend: str, ranks: int) -> None:
    total = sum(range(ranks))
    for seen in pools.Team(backend, ranks).run(many_at_once, 20):
        for turn, results in enumerate(seen):
            for number, result in enumerate(results):
                expected = total + ranks * (number + turn)
                assert result == pytest.approx(expected / ranks if number % 2 else expected)


def collectives_wait_for_pending_operations() -> tuple[float, bool]:
    backend = shoal.world().backend
    buffer = backend.empty(LENGTH).fill_(1.0)
    work = backend.start(AllReduce(buffer, ReduceOp.SUM))
    total = backend.all_reduce(torch.ones(1))
    return total.item() + buffer[-1].item(), work.is_done()


def test_a_collective_comes_after_pending_operations() -> None:
    assert pools.Team("shm", 3).run(collectives_wait_for_pending_operations) == [(6.0, True)] * 3


def behind_a_queue_that_is_busy_on_one_rank() -> float:
    backend: Any = shoal.world().backend
    buffer = backend.empty(LENGTH).fill_(1.0)
    if backend.rank == 0:
        gate = threading.Event()
        backend._coordination.start_queue().put(ThreadedWork(gate.wait, "something slow"))
        threading.Timer(0.1, gate.set).start()
    backend.start(AllReduce(buffer, ReduceOp.SUM)).wait(10.0)
    return buffer[-1].item()


def test_what_is_done_does_not_depend_on_how_far_a_queue_is() -> None:
    """Empty groups of gradients go through the queue, and what follows went there on some ranks."""
    assert pools.Team("shm", 2).run(behind_a_queue_that_is_busy_on_one_rank) == [2.0, 2.0]


def fail_before() -> list[float | str]:
    """A transfer fails on one rank; what is pending afterwards needs as many of every rank."""
    backend: Any = shoal.world().backend
    backend._coordination.explained = lambda error: TransportError(str(error))  # no news to await
    copy, found = backend._transfers.all_gather, []
    for fails in (True, False):
        backend._transfers.all_gather = too_many_files if fails and backend.rank == 1 else copy
        try:
            found.append(backend.all_gather(torch.ones(LENGTH)).sum().item())
        except TransportError:
            found.append("an error")
        buffer = backend.empty(LENGTH).fill_(1.0)
        found.append(backend.start(AllReduce(buffer, ReduceOp.SUM)).wait(10.0)[-1].item())
    del backend._coordination.explained, backend._transfers.all_gather
    return found


def too_many_files(*_: Any) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_transfer_that_failed_is_over_for_those_that_follow() -> None:
    found = pools.Team("shm", 2).run(fail_before)
    well = [2.0 * LENGTH, 2.0]
    assert found == [[*well, *well], ["an error", 2.0, *well]]


def asks(until_done: int) -> tuple[bool, int]:
    """One rank shows up late: the other asks in vain, without waiting."""
    world = shoal.world()
    buffer = world.backend.empty(LENGTH).fill_(1.0)
    if world.rank == 1:
        world.recv(src=0)
        return isinstance(
            world.backend.start(AllReduce(buffer, ReduceOp.SUM)).wait(), PendingOperation
        ), 0
    work = world.backend.start(AllReduce(buffer, ReduceOp.SUM))
    answers = [work.is_done() for _ in range(until_done)]
    with pytest.raises(DeadlineError, match=r"still under way after 0\.01 s"):
        work.wait(0.01)
    world.send(torch.ones(1), 1)
    work.wait()
    return isinstance(work, PendingOperation), sum(answers)


def test_asking_does_not_wait() -> None:
    assert pools.Team("shm", 2).run(asks, 50)[0] == (True, 0)


def differ() -> None:
    backend = shoal.world().backend
    backend.start(AllReduce(backend.empty(LENGTH + backend.rank), ReduceOp.SUM)).wait()


def one_does_not_post() -> None:
    backend = shoal.world().backend
    work = AllReduce(backend.empty(LENGTH), ReduceOp.SUM)
    if backend.rank:
        backend.run(work)
    else:
        backend.start(work).wait()


@pytest.mark.parametrize("disagree", [differ, one_does_not_post])
def test_ranks_that_disagree(disagree: Any) -> None:
    with pytest.raises(MismatchError, match=r"different (operations|calls)"):
        pools.Team("shm", 2).run(disagree)


# Reach ----------------------------------------------------------------------------------


def write_to_the_next() -> tuple[list[float], list[int]]:
    backend = shoal.world().backend
    memory = backend.empty(3 + backend.rank).fill_(-1.0)
    reachable = backend.reach(memory)
    assert reachable is not None
    reachable[(backend.rank + 1) % backend.size][0] = float(backend.rank)
    backend.barrier()
    return memory.tolist(), [len(other) for other in reachable]


def test_ranks_read_and_write_each_others_memory() -> None:
    (first, sizes), (second, _), (third, _) = pools.Team("shm", 3).run(write_to_the_next)
    assert sizes == [3, 4, 5]
    assert (first[0], second[0], third[0]) == (2.0, 0.0, 1.0)


def reach_something_else() -> None:
    shoal.world().backend.reach(torch.ones(3))


def test_only_memory_from_empty_can_be_reached() -> None:
    with pytest.raises(ValueError, match=r"only memory from Backend\.empty"):
        pools.Team("shm", 2).run(reach_something_else)


@pytest.mark.parametrize("backend", ["memory", "gloo"])
def test_elsewhere_there_is_nothing_to_reach(backend: str) -> None:
    def reach() -> Any:
        backend = shoal.world().backend
        return backend.shares_memory, backend.reach(backend.empty(3))

    assert pools.Team(backend, 2).run(reach) == [(False, None)] * 2

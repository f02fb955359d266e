"""Operations under way: several at once, in order, with deadlines of their own."""

from __future__ import annotations

import pytest
import torch

import shoal
from pools import Team
from shoal.comm import Work
from shoal.errors import DeadlineError, MismatchError, ShoalError


def many_in_flight(count):
    backend = shoal.world().backend
    tensors = [torch.full((1 + 997 * i,), float(i + backend.rank)) for i in range(count)]
    works = [backend.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert all(isinstance(work, Work) for work in works)
    for index in reversed(range(count)):  # the last first: all before it are done then
        assert works[index].wait() is tensors[index]
        assert works[index].is_done()
    return [tensor.unique().tolist() for tensor in tensors]


def test_many_in_flight(team: Team) -> None:
    ranks = sum(range(team.size))
    expected = [[float(i * team.size + ranks)] for i in range(20)]
    assert team.run(many_in_flight, 20) == [expected] * team.size


def mixed_sync_and_async():
    """A rank may wait at once where another does not: the order of calls is what counts."""
    backend = shoal.world().backend
    results, works = [], []
    for index in range(12):
        tensor = torch.full((3,), float(index))
        is_async = (index + backend.rank) % 3 != 0
        result = backend.all_reduce(tensor, async_op=is_async)
        works.append((result, tensor) if is_async else None)
        results.append(tensor)
        if index % 4 == 3:
            backend.barrier()
    for work in works:
        assert work is None or work[0].wait() is work[1]
    return [tensor.tolist() for tensor in results]


def test_mixed_synchronous_and_asynchronous(several: Team) -> None:
    expected = [[float(index * several.size)] * 3 for index in range(12)]
    assert several.run(mixed_sync_and_async) == [expected] * several.size


def every_kind():
    backend = shoal.world().backend
    size, rank = backend.size, backend.rank
    tensor = torch.full((size,), float(rank))
    root = torch.arange(float(size)) if rank == 0 else None
    works = {
        "all_reduce": backend.all_reduce(tensor.clone(), async_op=True),
        "reduce": backend.reduce(tensor.clone(), async_op=True),
        "broadcast": backend.broadcast(tensor.clone(), root=size - 1, async_op=True),
        "all_gather": backend.all_gather(tensor[:1], async_op=True),
        "gather": backend.gather(tensor[:1], async_op=True),
        "scatter": backend.scatter(root, async_op=True),
        "reduce_scatter": backend.reduce_scatter(tensor, async_op=True),
        "all_to_all": backend.all_to_all(tensor, async_op=True),
        "barrier": backend.barrier(async_op=True),
    }
    results = {name: work.wait() for name, work in works.items()}
    again = {name: work.wait() for name, work in works.items()}
    assert all(again[name] is results[name] for name in results)
    return {name: None if value is None else value.tolist() for name, value in results.items()}


def test_every_collective_has_an_asynchronous_form(team: Team) -> None:
    size = team.size
    total, everybody = float(sum(range(size))), [float(rank) for rank in range(size)]
    for rank, results in enumerate(team.run(every_kind)):
        assert results == {
            "all_reduce": [total] * size,
            "reduce": [total] * size if rank == 0 else None,
            "broadcast": [float(size - 1)] * size,
            "all_gather": everybody,
            "gather": everybody if rank == 0 else None,
            "scatter": [float(rank)],
            "reduce_scatter": [total],
            "all_to_all": everybody,
            "barrier": None,
        }


def wait_with_a_deadline():
    backend = shoal.world().backend
    tensor, errors = torch.ones(5), []
    if backend.rank == 0:
        work = backend.all_reduce(tensor, async_op=True)
        for _ in range(2):
            try:
                work.wait(timeout=0.05)
            except DeadlineError as error:
                errors.append(str(error))
        assert not work.is_done()
        for peer in range(1, backend.size):
            backend.send(torch.zeros(1), peer)  # only now do the others begin
        result = work.wait(timeout=30.0)
    else:
        backend.recv(src=0)
        result = backend.all_reduce(tensor)
    return errors, result.tolist()


def test_a_wait_that_ran_out_can_be_repeated(several: Team) -> None:
    if several.backend == "memory":
        pytest.skip("threads that take turns have no time to run out of")
    results = several.run(wait_with_a_deadline)
    assert len(results[0][0]) == 2
    assert all("all_reduce(float32[5]" in error and "0.05" in error for error in results[0][0])
    assert all(total == [float(several.size)] * 5 for _, total in results)


def errors_at_wait():
    backend = shoal.world().backend
    good = backend.all_reduce(torch.ones(2), async_op=True)
    bad = backend.all_reduce(torch.ones(2 + backend.rank), async_op=True)
    after = backend.all_reduce(torch.ones(2), async_op=True)
    raised = []
    for _ in range(2):
        try:
            bad.wait()
        except ShoalError as error:
            raised.append(error)
    return good.wait().tolist(), raised, after.wait().tolist(), bad.is_done()


def test_an_error_surfaces_at_wait_and_later_work_goes_on(several: Team) -> None:
    total = [float(several.size)] * 2
    for good, raised, after, is_done in several.run(errors_at_wait):
        assert (good, after, is_done) == (total, total, True)
        assert [type(error) for error in raised] == [MismatchError] * 2
        assert "float32[2]" in str(raised[0])
        assert "float32[3]" in str(raised[0])


def overlap():
    """Work goes on while this rank computes: the last rank to begin finds it nearly done."""
    backend = shoal.world().backend
    tensor = torch.ones(100003)
    work = backend.all_reduce(tensor, async_op=True)
    product = torch.ones(200, 200) @ torch.ones(200, 200)
    gathered = backend.all_gather(product[:1, :2])  # behind the other, whose result is there
    return work.is_done(), work.wait().unique().tolist(), gathered.shape


def test_a_later_operation_ends_after_an_earlier_one(several: Team) -> None:
    expected = (True, [float(several.size)], (several.size, 2))
    assert several.run(overlap) == [expected] * several.size


def input_is_taken_at_the_call():
    """What has to be copied is copied when called; the caller may go on with the original."""
    backend = shoal.world().backend
    tensor = torch.full((4, 4), float(backend.rank)).t()[:, ::2]
    work = backend.all_gather(tensor, async_op=True)
    result = work.wait()
    return result[:, 0].tolist()


def test_asynchronous_gather_of_a_view(several: Team) -> None:
    expected = [float(rank) for rank in range(several.size) for _ in range(4)]
    assert several.run(input_is_taken_at_the_call) == [expected] * several.size


def for_inference():
    backend = shoal.world().backend
    with torch.inference_mode():
        whole, strided = torch.ones(4), torch.ones(4, 2)[:, 0]
        works = [backend.all_reduce(tensor, async_op=True) for tensor in (whole, strided)]
        return [work.wait().tolist() for work in works]


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_tensors_made_for_inference(backend) -> None:
    assert Team(backend, 2).run(for_inference) == [[[2.0] * 4] * 2] * 2


def first_for_inference():
    """All operations, at sizes that go several ways, before anything was done outside."""
    backend = shoal.world().backend
    results = []
    for is_inference in (True, False):
        with torch.inference_mode(is_inference):
            for numel in (6, 6000, 600_000):
                ones = torch.ones(numel)
                one = ones[: numel // backend.size]
                results.append(
                    [
                        backend.all_reduce(ones.clone()).sum().item(),
                        backend.reduce_scatter(ones).sum().item() * backend.size,
                        backend.all_gather(one).sum().item() * backend.size,
                        backend.all_to_all(ones).sum().item() * backend.size,
                        backend.broadcast(ones.clone()).sum().item() * backend.size,
                    ]
                )
                other = 1 - backend.rank
                work = backend.send(ones, other, async_op=True)
                results[-1].append(backend.recv(src=other).sum().item() * 2)
                work.wait()
    return results


@pytest.mark.parametrize("backend", ["memory", "shm", "gloo", "mpi"])
def test_memory_first_used_for_inference_trains_as_well(backend) -> None:
    """What a transport kept for later was of inference mode, and nobody else could write to it."""
    expected = [[2.0 * numel] * 6 for numel in (6, 6000, 600_000)] * 2
    assert shoal.run(first_for_inference, 2, backend) == [expected] * 2

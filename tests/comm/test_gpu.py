"""Tensors on a GPU: threads as ranks, processes over Gloo, and NCCL."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shoal
from gpus import over_nccl
from shoal.comm import Mesh, ReduceOp
from shoal.comm import differentiable as d
from shoal.comm.operation import AllReduce
from shoal.errors import MismatchError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def collectives(dtype_name):
    """Every collective on CUDA tensors, against what it must give."""
    backend = shoal.world().backend
    rank, size = backend.rank, backend.size
    dtype = getattr(torch, dtype_name)
    device = backend.device if backend.name == "nccl" else torch.device("cuda", 0)
    values = [torch.arange(7, device=device).to(dtype) + r for r in range(size)]
    total = torch.stack(values).sum(0)
    x = values[rank].clone()
    assert backend.all_reduce(x) is x
    assert torch.equal(x, total), "all_reduce"
    rows = torch.full((rank + 1, 2), rank, device=device).to(dtype)
    joined = backend.all_gather(rows)
    assert joined.device.type == "cuda"
    assert joined[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)], "all_gather"
    part = backend.reduce_scatter(values[rank].clone())
    assert torch.equal(part, total.tensor_split(size)[rank]), "reduce_scatter"
    y = values[rank].clone()
    backend.broadcast(y, root=size - 1)
    assert torch.equal(y, values[size - 1]), "broadcast"
    gathered = backend.gather(values[rank], root=0)
    assert (gathered is None) == (rank != 0), "gather"
    reduced = backend.reduce(values[rank].clone(), root=0)
    assert rank != 0 or torch.equal(reduced, total), "reduce"
    arrived = backend.all_to_all(torch.arange(size * 2, device=device).to(dtype))
    assert arrived.tolist() == [2 * rank, 2 * rank + 1] * size, "all_to_all"
    if size > 1:
        if rank == 0:
            backend.send(values[0], 1)
        if rank == 1:
            z = torch.empty_like(values[1])
            backend.recv(z, src=0)
            assert torch.equal(z, values[0]), "recv"
    works = [backend.all_reduce(values[rank].clone(), async_op=True) for _ in range(3)]
    assert all(torch.equal(work.wait(), total) for work in works), "async"
    assert backend.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    backend.barrier()
    return "ok"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_threads_as_ranks_on_one_gpu(dtype, ranks):
    assert shoal.run(collectives, ranks=ranks, backend="memory", args=(dtype,)) == ["ok"] * ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_processes_over_gloo_on_one_gpu(dtype):
    assert shoal.run(collectives, ranks=2, backend="gloo", args=(dtype,)) == ["ok"] * 2


def test_nccl_alone():
    assert shoal.run(collectives, ranks=1, backend="nccl", args=("float32",)) == ["ok"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=over_nccl(n)) for n in (2, 3)])
def test_nccl(dtype, ranks):
    assert shoal.run(collectives, ranks=ranks, backend="nccl", args=(dtype,)) == ["ok"] * ranks


def test_nccl_refuses_cpu_tensors():
    def refused():
        with pytest.raises(TypeError, match="nccl"):
            shoal.world().all_reduce(torch.ones(2))
        return "refused"

    assert shoal.run(refused, ranks=1, backend="nccl") == ["refused"]


def tell_from_the_cpu():
    """Messages of tensors on the CPU: received into one, as a new one, in the background."""
    world = shoal.world()
    values = torch.arange(5.0)
    if world.rank == 0:
        for tag in range(3):
            world.send(values + tag, 1, tag)
        return "sent"
    into = torch.empty(5)
    assert world.recv(into, src=0) is into
    fresh = world.recv(src=0, tag=1)
    later = world.recv(src=0, tag=2, async_op=True).wait()
    assert [each.device.type for each in (fresh, later)] == ["cpu", "cpu"]
    return [each.tolist() for each in (into - values, fresh - values, later - values)]


@over_nccl(2)
def test_messages_from_the_cpu_over_nccl():
    _, received = shoal.run(tell_from_the_cpu, ranks=2, backend="nccl")
    assert received == [[0] * 5, [1] * 5, [2] * 5]


def long_work(device):
    """Something that keeps the GPU busy far longer than launching takes."""
    x = torch.randn(4096, 4096, device=device)
    for _ in range(200):
        x = x @ x * 1e-3
    return x


def wait_on_the_stream():
    """Twice: to load kernels that are used for the first time holds up the host."""
    return [_wait_on_the_stream(shoal.world().backend) for _ in range(2)][1]


def _wait_on_the_stream(backend):
    device, stream = backend.device, torch.cuda.current_stream(backend.device)
    x = torch.ones(1000, device=device)
    x += long_work(device)[0, 0] * 0
    work = backend.all_reduce(x, async_op=True)
    assert work.wait() is x
    was_busy = not stream.query()
    assert x.unique().tolist() == [backend.size]
    assert work.is_done()
    assert work.wait() is x
    return was_busy


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=over_nccl(n)) for n in (1, 2)])
def test_waiting_is_the_streams_business(ranks):
    assert shoal.run(wait_on_the_stream, ranks=ranks, backend="nccl") == [True] * ranks


def let_go_of_memory(wait):
    backend = shoal.world().backend
    device = backend.device
    for _ in range(3):
        x = torch.ones(1 << 22, device=device)
        long_work(device)
        work = backend.all_reduce(x, async_op=True)
        if wait:
            work.wait()
        del x, work
        # What is made now may get the memory of x, if that is free.
        others = [torch.zeros(1 << 22, device=device) for _ in range(4)]
        torch.cuda.synchronize()
        assert not any(other.any() for other in others)
    return "ok"


@pytest.mark.parametrize("wait", [True, False])
@over_nccl(2)
def test_memory_of_an_operation_is_not_given_away_before_its_end(wait):
    assert shoal.run(let_go_of_memory, ranks=2, backend="nccl", args=(wait,)) == ["ok"] * 2


def make_results_on_the_side():
    """New tensors of operations in the background, dropped while they are in use."""
    backend = shoal.world().backend
    totals = []
    for number in range(30):
        given = torch.full((1 << 18,), float(number), device=backend.device)
        joined = backend.all_gather(given, async_op=True).wait()
        totals.append((joined.double() * 2).sum())
        del joined
    return [total.item() for total in totals]


@over_nccl(2)
def test_results_that_are_dropped_while_in_use():
    expected = [number * 4.0 * (1 << 18) for number in range(30)]
    assert shoal.run(make_results_on_the_side, ranks=2, backend="nccl") == [expected] * 2


def foresee(is_right):
    """Two operations that were compared twice are taken to be the same the third time."""
    backend = shoal.world().backend

    def run(length):
        operation = AllReduce(torch.ones(length, device=backend.device), ReduceOp.SUM)
        operation.is_foreseeable = True
        return backend.run(operation, async_op=True)

    for length in (1000, 2000) * 3:
        assert run(length).wait().unique().tolist() == [backend.size]
    first = run(1000 if is_right or backend.rank else 2000)
    if is_right:
        return first.wait().sum().item()
    with pytest.raises(MismatchError, match="start again from the last checkpoint"):
        first.confirm()
    with pytest.raises(MismatchError, match=r"rank 0: (.*\n)*.*2000"):
        first.wait()
    with pytest.raises(MismatchError):
        run(1000)
    with pytest.raises(MismatchError):
        shoal.world().all_gather_object(1)
    return "known"


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=over_nccl(n)) for n in (2, 3)])
def test_foreseen_operations(ranks):
    right = shoal.run(foresee, ranks=ranks, backend="nccl", args=(True,))
    assert right == [ranks * 1000.0] * ranks
    assert shoal.run(foresee, ranks=ranks, backend="nccl", args=(False,)) == ["known"] * ranks


DRAWING = """
import shoal, torch

def draw():
    numbers = torch.rand(3, device="cuda").tolist()
    shoal.world().barrier()
    return numbers + torch.rand(3, device="cuda").tolist()

torch.manual_seed(5)
first = shoal.run(draw, 3, "memory")
torch.manual_seed(5)
again = shoal.run(draw, 3, "memory")
assert first == again == [first[0]] * 3, (first, again)
"""


def test_ranks_that_are_the_first_to_use_the_gpu_begin_alike():
    """And draw the same when the run is repeated: threads share the generator."""
    subprocess.run([sys.executable, "-c", DRAWING], check=True, timeout=100)


def test_side_streams_in_threads():
    def work():
        backend = shoal.world().backend
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(1 << 22, device="cuda")
            for _ in range(20):
                x = x * 1.0 + 1.0
            backend.all_reduce(x)
            torch.cuda.current_stream().synchronize()
        return x.unique().tolist()

    assert shoal.run(work, ranks=2, backend="memory") == [[42.0], [42.0]]


def test_gradients_through_collectives():
    def work():
        group = Mesh(tensor=2).group("tensor")
        x = torch.ones(4, 3, device="cuda", requires_grad=True)
        d.join(d.split(x, group, 1) * 2, group, 1).sum().backward()
        return x.grad.unique().tolist()

    assert shoal.run(work, ranks=2, backend="memory") == [[2.0], [2.0]]

"""Tensors of every length and place over shared memory, read directly or not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pools
import shoal
from control_worlds import InnerBootstrap
from shoal.comm import Backend
from shoal.comm.bootstrap.connect import connect_backend
from shoal.comm.control import connect
from shoal.system import libc
from shoal.torch_support import process_memory as direct

KIB = 256  # floats
FORBIDDEN = "this system does not let processes read each other's memory"


def filled(backend: Backend, length: int, place: str, seed: int) -> Tensor:
    """Different on each rank; rank 0 alone has it in shared memory if the place is mixed."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    if place == "own" or (place == "mixed" and backend.rank == 0):
        return backend.empty(length).copy_(values)
    return values


def sources(backend: Backend, length: int) -> list[Tensor]:
    """What all ranks begin with."""
    seeds = range(backend.size)
    return [filled(backend, length, "plain", seed) for seed in seeds]


def all_reduce(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    return backend.all_reduce(mine), sum(every)


def average(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    return backend.all_reduce(mine, "average"), sum(every) / backend.size


def reduce_scatter(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    return backend.reduce_scatter(mine), sum(every).tensor_split(backend.size)[backend.rank]


def all_gather(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    return backend.all_gather(mine), torch.cat(every)


def all_gather_unevenly(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    """Some short, some long: each rank shows its own in its own way."""
    parts = [whole[: len(whole) // (3 * rank + 1)] for rank, whole in enumerate(every)]
    return backend.all_gather(mine[: parts[backend.rank].numel()]), torch.cat(parts)


def broadcast(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    return backend.broadcast(mine, root=1), every[1]


def scatter(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    found = backend.scatter(mine if backend.rank == 1 else None, root=1)
    return found, every[1].tensor_split(backend.size)[backend.rank]


def gather(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    found = backend.gather(mine, root=1)
    return (found, torch.cat(every)) if backend.rank == 1 else (torch.zeros(1), torch.zeros(1))


def all_to_all(backend: Backend, mine: Tensor, every: list[Tensor]) -> Any:
    parts = [whole.tensor_split(backend.size)[backend.rank] for whole in every]
    return backend.all_to_all(mine), torch.cat(parts)


OPERATIONS: list[Callable[..., Any]] = [
    all_reduce, average, reduce_scatter, all_gather, all_gather_unevenly, broadcast, scatter,
    gather, all_to_all,
]  # fmt: skip


def differences(lengths: list[int], place: str, is_direct: bool) -> list[str]:
    """What was wrong, of everything at every length; twice, for the second finds recipes."""
    backend = shoal.world().backend
    control: Any = backend._page_control  # type: ignore[attr-defined]
    if is_direct and not control.ranks_read_directly:
        return [FORBIDDEN]
    allowed, control.ranks_read_directly = control.ranks_read_directly, is_direct
    wrong = []
    for length in lengths:
        every = sources(backend, length)
        for operation in OPERATIONS * 2:
            mine = filled(backend, length, place, backend.rank)
            found, expected = operation(backend, mine, every)
            if not torch.allclose(found, expected, atol=1e-6):
                wrong.append(f"{operation.__name__} of {length}")
    control.ranks_read_directly = allowed
    return wrong


PLACES = ("plain", "own", "mixed")
# Each number of ranks in each place, one of the two ways; the other one in the full run.
DIRECT = {(2, "plain"), (2, "mixed"), (3, "own")}


def cases() -> Iterator[object]:
    for ranks, place, is_direct in itertools.product((2, 3), PLACES, (True, False)):
        marks = [] if is_direct == ((ranks, place) in DIRECT) else [pytest.mark.full]
        yield pytest.param(ranks, place, is_direct, marks=marks)


@pytest.mark.parametrize(("ranks", "place", "is_direct"), list(cases()))
def test_every_length_in_every_place(ranks: int, place: str, is_direct: bool) -> None:
    lengths = [length * KIB for length in (33, 300, 600, 1500, 2100, 5000)]
    lengths = [length - length % 6 + 6 for length in lengths]
    found = pools.Team("shm", ranks).run(differences, lengths, place, is_direct)
    if found[0] == [FORBIDDEN]:
        pytest.skip(FORBIDDEN)
    assert found == [[]] * ranks


def other_dtypes() -> list[str]:
    backend, wrong = shoal.world().backend, []
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool):
        every = [(torch.arange(3 << 20) % 2 == rank).to(dtype) for rank in range(2)]
        mine = every[backend.rank]
        if not torch.equal(backend.all_gather(mine), torch.cat(every)):
            wrong.append(f"all_gather of {dtype}")
        if not torch.equal(backend.all_reduce(mine, "max"), torch.ones_like(mine)):
            wrong.append(f"all_reduce of {dtype}")
    return wrong


def test_other_dtypes() -> None:
    assert pools.Team("shm", 2).run(other_dtypes) == [[], []]


def who_reads() -> list[tuple[bool, bool]] | str:
    """Of an all-reduce, an all-gather and a broadcast: whether ranks 0 and 1 read the other."""
    backend: Any = shoal.world().backend
    if not backend._page_control.ranks_read_directly:
        return FORBIDDEN
    seen, really_read = [], libc.read_process_memory
    libc.read_process_memory = lambda *args: (reads.append(args), really_read(*args))  # type: ignore[assignment]
    try:
        for kind, length in (
            ("all_reduce", 1 << 20),
            ("all_gather", 1 << 20),
            ("broadcast", 1 << 18),
        ):
            reads: list[Any] = []
            getattr(backend, kind)(torch.ones(length))
            seen.append(tuple(backend.all_gather_object(bool(reads))))
    finally:
        libc.read_process_memory = really_read
    return seen


def test_what_is_said_to_be_read_directly_is() -> None:
    """The other tests would not notice if everything were copied."""
    found = pools.Team("shm", 2).run(who_reads)[0]
    if found == FORBIDDEN:
        pytest.skip(FORBIDDEN)
    assert found == [(True, True), (True, True), (False, True)]


def what_backward_needs() -> str:
    world = shoal.world()
    factor = torch.ones(300 * KIB * 2)
    product = (factor * torch.ones_like(factor, requires_grad=True)).sum()
    world.broadcast(factor, root=0)
    try:
        product.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def test_autograd_knows_of_what_was_read() -> None:
    said = pools.Team("shm", 2).run(what_backward_needs)
    assert "modified by an inplace operation" in said[1]


def one_rank_has_used_cuda(length: int) -> list[float]:
    """Rank 1 does not show its memory; again and again, as the halves of the staging alternate."""
    backend = shoal.world().backend
    is_initialized, sums = torch.cuda.is_initialized, []
    if backend.rank == 1:
        torch.cuda.is_initialized = lambda: True
    try:
        for number in range(3):
            tensor = torch.full((length,), float(backend.rank + number))
            sums += backend.all_reduce(tensor).unique().tolist()
    finally:
        torch.cuda.is_initialized = is_initialized
    return sums


def test_one_rank_shows_its_memory_and_the_other_does_not() -> None:
    found = pools.Team("shm", 2).run(one_rank_has_used_cuda, 5000 * KIB)
    assert found == [[1.0, 3.0, 5.0]] * 2


# Whether it is allowed --------------------------------------------------------------------


def test_nothing_is_read_that_is_not_there() -> None:
    assert not direct.can_read(os.getpid(), 8)
    assert not direct.can_read(2**22 + 1, direct.probe_address())
    with pytest.raises(OSError, match=f"cannot read memory of process {os.getpid()}"):
        direct.read_into(torch.empty(8), os.getpid(), 8)


def one_rank_cannot() -> tuple[bool, bool]:
    """Rank 1 has a system that forbids it."""
    world = shoal.world()
    allowed = connect.can_read
    if world.rank == 1:
        connect.can_read = lambda pid, address: False
    try:
        inner: Any = connect_backend("shm", InnerBootstrap(world), 30.0)
    finally:
        connect.can_read = allowed
    with inner:
        gathered = inner.all_gather(torch.full((3 << 20,), float(world.rank)))
        is_direct = inner._page_control.ranks_read_directly
    world.barrier()
    return is_direct, bool(gathered.sum() == 3 << 20)


def test_unless_all_can_nobody_does() -> None:
    assert pools.Team("shm", 2).run(one_rank_cannot) == [(False, True)] * 2


def test_what_was_granted_ends_with_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Yama has it: ranks in the background of a shell that is gone."""
    monkeypatch.setattr(direct, "_granted", {})
    monkeypatch.setattr(direct, "_is_for_ancestors_only", lambda: True)
    assert direct.is_readable()
    direct.probe_address()
    assert direct.is_readable()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not direct.is_readable()

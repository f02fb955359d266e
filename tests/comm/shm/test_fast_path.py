"""The same small calls again and again: only the data may differ, and nothing else is missed."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pools
import shoal
from shoal.errors import MismatchError, TransportError

backends = pytest.mark.parametrize("backend", ["shm", "gloo"])


def repeat_each(seed: int) -> list[list[float]]:
    """Calls in an order that all ranks share, from the same few lines."""
    backend = shoal.world().backend
    rank, size, dice = backend.rank, backend.size, random.Random(seed)
    whole, own = torch.zeros(6 * size), backend.empty(6)
    square = torch.zeros(2, 3)
    calls: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: backend.all_reduce(square),
        "max": lambda: backend.all_reduce(square, "max"),
        "scatter": lambda: backend.reduce_scatter(whole, out=own),
        "gather": lambda: backend.all_gather(own, out=whole),
        "broadcast": lambda: backend.broadcast(square, root=dice.randrange(size)),
        "in a thread": lambda: backend.all_reduce(square, async_op=True).wait(),
        "with gradient": lambda: backend.all_reduce(square.clone().requires_grad_()).detach(),
        "transposed": lambda: backend.all_reduce(square.t()),
        "by bytes": lambda: backend.all_reduce(square.to(torch.uint8), "max").float(),
    }
    seen = []
    for turn in range(60):
        name = dice.choice(list(calls))
        whole.copy_(torch.arange(6.0 * size) + rank + turn)
        own.fill_(rank * 2 + turn)
        square.copy_(torch.arange(6.0).view(2, 3) + rank * turn)
        result = calls[name]()
        seen.append(result.flatten().tolist())
        if turn % 20 == 10:
            backend.empty(2 << 20)  # comes and goes: places in memory get other names
    return seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_same_as_in_memory(ranks: int) -> None:
    expected = pools.Team("memory", ranks).run(repeat_each, 5)
    assert pools.Team("shm", ranks).run(repeat_each, 5) == expected


def differ_after_a_while(what: str) -> tuple[str, float]:
    """The same line for all, until one rank calls something else from it."""
    world = shoal.world()
    kept = torch.ones(4)
    for turn in range(10):
        tensor, op = torch.ones(4), "sum"
        if turn == 9 and world.rank == 1:
            tensor = {"shape": torch.ones(5), "dtype": torch.ones(4).double()}.get(what, tensor)
            op = "max" if what == "op" else op
        try:
            kept = world.all_reduce(tensor, op)
        except MismatchError as error:
            return str(error), tensor.sum().item()
    return "", kept.sum().item()


@backends
@pytest.mark.parametrize("what", ["shape", "dtype", "op"])
def test_a_difference_is_noticed_however_often_it_went_well(backend: str, what: str) -> None:
    for rank, (message, total) in enumerate(pools.Team(backend, 2).run(differ_after_a_while, what)):
        assert "the ranks called different operations as #" in message
        assert total == (5 if (rank, what) == (1, "shape") else 4), "nothing was moved"


def rows_of_any_size(turns: int) -> bool:
    """Rows change from call to call, and some ranks have so many that they take the long way."""
    backend = shoal.world().backend
    for turn in range(turns):
        rows = [(rank + turn) % 3 * 20000 + 7 for rank in range(backend.size)]
        own = torch.full((rows[backend.rank],), float(backend.rank + turn))
        out = torch.empty(sum(rows))
        backend.all_gather(own, out=out)
        parts = [part.unique().tolist() for part in out.split(rows)]
        if parts != [[float(rank + turn)] for rank in range(backend.size)]:
            return False
    return True


def test_gathers_of_changing_rows() -> None:
    assert pools.Team("shm", 3).run(rows_of_any_size, 12) == [True] * 3


def broadcast_large(own_memory: list[bool]) -> list[float]:
    """The root can write to some receivers' memory, and not to others'."""
    backend = shoal.world().backend
    numel = 100_003
    sums = []
    for root in range(backend.size):
        tensor = backend.empty(numel) if own_memory[backend.rank] else torch.empty(numel)
        tensor.fill_(float(backend.rank))
        if backend.rank == root:
            tensor.copy_(torch.arange(float(numel)) + root)
        backend.broadcast(tensor, root=root)
        expected = torch.arange(float(numel)) + root
        sums.append((tensor - expected).abs().max().item())
    return sums


@pytest.mark.parametrize(
    "own_memory", [[True, True, True], [True, False, True], [False, True, False]], ids=str
)
def test_broadcast_to_memory_of_either_kind(own_memory: list[bool]) -> None:
    assert pools.Team("shm", 3).run(broadcast_large, own_memory) == [[0.0] * 3] * 3


def fail_once() -> list[float | str]:
    """The first time, rank 1 cannot map what the others have; then both halves again and again."""
    backend: Any = shoal.world().backend
    backend._coordination.explained = lambda error: TransportError(str(error))  # no news to await
    mapped = backend._exposer.staged_wholes
    found: list[float | str] = []
    for turn in range(5):
        tensor = torch.full((100,), float(backend.rank + 1))
        if backend.rank == 1:
            backend._exposer.staged_wholes = mapped if turn else too_many_files
        try:
            found.append(backend.all_reduce(tensor)[0].item())
        except TransportError:
            found.append("an error")
    del backend._coordination.explained
    return found


def too_many_files(*_: Any) -> list[Tensor]:
    raise OSError(errno.EMFILE, "Too many open files")


def test_what_failed_the_first_time_is_not_taken_for_known() -> None:
    found = pools.Team("shm", 2).run(fail_once)
    assert found == [[3.0] * 5, ["an error", 3.0, 3.0, 3.0, 3.0]]


def broadcast_column(numel: int) -> list[float]:
    """Contiguous, although a step in its last dimension would be a long one: it takes none."""
    backend: Any = shoal.world().backend
    backend._page_control.ranks_read_directly = False
    column = torch.full((1, numel), float(backend.rank)).t()
    assert column.is_contiguous()
    try:
        return [number for _ in range(3) for number in backend.broadcast(column).unique().tolist()]
    finally:
        backend._page_control.ranks_read_directly = True


def test_broadcast_of_a_column() -> None:
    assert pools.Team("shm", 2).run(broadcast_column, 300_000) == [[0.0] * 3] * 2

"""What every backend must do, as checks that run on the ranks of any world.

A `Case` is drawn in the test process and shipped to all ranks. Every rank can compute every
rank's input from it, so each knows the right result by itself, with plain torch and nothing of
shoal's own arithmetic. Values are small integers: their sums and products are exact in every
dtype, so results must be equal and not merely close.

A check first communicates and then compares, so a rank that finds a difference has not left
the others waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.comm import Backend

SENTINEL = 7
EDGE = 5
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
REDUCED = (*FLOATS, *INTEGERS, torch.bool)
# What is only moved may have any dtype.
MOVED = (*REDUCED, torch.int8, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn)
MEMORIES = ("plain", "own", "view")
LAYOUTS = ("contiguous", "transposed", "strided")


@dataclass(frozen=True)
class Case:
    """One collective call, for all ranks; tuples are by rank.

    Attributes:
        rows: Length of each rank's tensor along its first dimension.
        trailing: The other dimensions, the same on every rank.
        is_scalar: The tensor has no dimension at all.
        sizes: How each rank splits its tensor; None for evenly.
        memory: Where each rank's input lies.
        layout: How its elements are spread there.
        gives_out: Whether the rank passes a tensor for the result (to broadcast: any tensor).
        is_async: Whether the rank goes through a `Work`.
    """

    rows: tuple[int, ...]
    trailing: tuple[int, ...] = ()
    is_scalar: bool = False
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    root: int = 0
    sizes: tuple[tuple[int, ...], ...] | None = None
    memory: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    gives_out: tuple[bool, ...] = ()
    is_async: tuple[bool, ...] = ()
    seed: int = 0

    def shape(self, rank: int = 0) -> tuple[int, ...]:
        """The shape of a rank's tensor."""
        if self.is_scalar:
            return ()
        rows = self.rows[rank] if self.sizes is None else sum(self.sizes[rank])
        return (rows, *self.trailing)

    def split(self, rank: int = 0) -> list[int]:
        """How many rows of a rank's tensor go to each rank."""
        if self.sizes is not None and not self.is_scalar:
            return list(self.sizes[rank])
        rows = 1 if self.is_scalar else self.rows[rank]
        return shares(rows, len(self.rows))

    def values(self, rank: int, shape: Sequence[int]) -> Tensor:
        """The input of a rank."""
        return values(shape, self.dtype, 1000 * self.seed + rank, self.op)


def shares(length: int, num_parts: int) -> list[int]:
    """Even parts, the remainder to the first."""
    parts = [0] * num_parts
    for i in range(length % num_parts):
        parts[i] += 1
    return [part + length // num_parts for part in parts]


def values(shape: Sequence[int], dtype: torch.dtype, seed: int, op: str = "sum") -> Tensor:
    """Small integers, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-2, 3) if op == "product" else (-8, 9)
    low = low if dtype.is_signed else 0
    high = 2 if dtype is torch.bool else high
    whole = torch.float32 if dtype.is_floating_point else torch.int64
    return torch.randint(low, high, tuple(shape), generator=generator, dtype=whole).to(dtype)


def reduced(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """The reduction, by definition, in the widest type."""
    dtype = inputs[0].dtype
    wide = torch.stack(list(inputs)).to(torch.float64 if dtype.is_floating_point else torch.int64)
    result = {
        "sum": lambda: wide.sum(0),
        "average": lambda: wide.sum(0) / len(inputs),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
        "product": lambda: wide.prod(0),
    }[op]()
    return result.to(dtype)


class Placed:
    """A tensor with given values in some memory and layout, and what lies around it."""

    def __init__(self, backend: Backend, content: Tensor, memory: str, layout: str) -> None:
        self._content, self._backend = content.clone(), backend
        numel = content.numel() * (2 if layout == "strided" else 1)
        edge = EDGE if memory == "view" else 0
        self._buffer = self._allocate(memory, numel + 2 * edge).fill_(SENTINEL)
        inner = self._buffer[edge : edge + numel]
        self.tensor = _arranged(inner, content.shape, layout)
        self.tensor.copy_(content)
        self._around = self._mask(self.tensor)

    def _allocate(self, memory: str, numel: int) -> Tensor:
        dtype = self._content.dtype
        if memory == "plain":
            return torch.empty(numel, dtype=dtype)
        return self._backend.empty(numel, dtype)

    def _mask(self, tensor: Tensor) -> Tensor:
        """The bytes of the buffer that the tensor does not use, for later."""
        probe = torch.zeros(self._buffer.numel(), dtype=torch.bool)
        start = tensor.storage_offset() - self._buffer.storage_offset()
        probe.as_strided(tensor.shape, tensor.stride(), start).fill_(True)
        return ~probe

    def check_untouched(self) -> None:
        """The tensor still has the values it was made with."""
        same(self.tensor, self._content, "an input was changed")

    def check_edges(self) -> None:
        """Nobody wrote beside the tensor."""
        around = _bytes(self._buffer)[self._around]
        expected = _bytes(torch.full((around.shape[0],), SENTINEL).to(self._content.dtype))
        same(around, expected, "a byte beside a tensor was changed")


def _arranged(flat: Tensor, shape: Sequence[int], layout: str) -> Tensor:
    if layout == "strided":
        return flat.view((*shape, 2))[..., 1]
    if layout == "transposed":
        return flat.view(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))
    return flat.view(shape)


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raises unless two tensors are equal in shape, dtype and every element."""
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    if expected.dtype not in REDUCED:
        actual, expected = _bytes(actual), _bytes(expected)
    assert torch.equal(actual, expected), f"{what}: {_difference(actual, expected)}"


def _bytes(tensor: Tensor) -> Tensor:
    fresh = torch.empty(tensor.numel(), 1, dtype=tensor.dtype)
    return fresh.copy_(tensor.reshape(-1, 1)).view(torch.uint8)


def _difference(actual: Tensor, expected: Tensor) -> str:
    wrong = (actual != expected).reshape(-1).nonzero().reshape(-1)
    first = int(wrong[0])
    found, wanted = actual.reshape(-1)[first].item(), expected.reshape(-1)[first].item()
    return (
        f"{wrong.numel()} of {expected.numel()} elements differ, the first at {first}: "
        f"{found} is not {wanted}"
    )


Check = Callable[[Backend, Case], None]


def run_cases(check: Check, cases: Sequence[Case]) -> list[str]:
    """Runs the cases on this rank, in turn; what went wrong, in words."""
    backend = shoal.world().backend
    failures = []
    for case in cases:
        try:
            check(backend, case)
        except AssertionError as error:
            failures.append(f"rank {backend.rank}: {error}\n  in {case}")
    return failures


def _call(
    case: Case, backend: Backend, method: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    if not case.is_async[backend.rank]:
        return method(*args, **options)
    return method(*args, **options, async_op=True).wait()


def _place(backend: Backend, case: Case, shape: Sequence[int]) -> Placed:
    rank = backend.rank
    return Placed(backend, case.values(rank, shape), case.memory[rank], case.layout[rank])


def _place_out(backend: Backend, case: Case, shape: Sequence[int]) -> Placed | None:
    """A tensor for the result, where the case has one, in another memory than the input."""
    if not case.gives_out[backend.rank]:
        return None
    other = (backend.rank + 1) % backend.size
    junk = values(shape, case.dtype, 9)
    return Placed(backend, junk, case.memory[other], case.layout[other])


def _check_out(result: Any, out: Placed | None, expected: Tensor) -> None:
    assert isinstance(result, Tensor), f"the result is {result!r}"
    same(result, expected, "the result is wrong")
    if out is not None:
        assert result is out.tensor, "the result is not the out that was given"
        out.check_edges()


# The collectives ------------------------------------------------------------------------


def check_all_reduce(backend: Backend, case: Case) -> None:
    """In place on every rank."""
    mine = _place(backend, case, case.shape())
    result = _call(case, backend, backend.all_reduce, mine.tensor, case.op)
    inputs = [case.values(rank, case.shape()) for rank in range(backend.size)]
    assert result is mine.tensor, "the result is not the tensor itself"
    same(result, reduced(case.op, inputs), "the reduction is wrong")
    mine.check_edges()


def check_reduce(backend: Backend, case: Case) -> None:
    """In place on the root; the others keep what they have and get nothing."""
    mine = _place(backend, case, case.shape())
    result = _call(case, backend, backend.reduce, mine.tensor, case.op, root=case.root)
    if backend.rank == case.root:
        inputs = [case.values(rank, case.shape()) for rank in range(backend.size)]
        assert result is mine.tensor, "the result is not the tensor itself"
        same(result, reduced(case.op, inputs), "the reduction is wrong")
    else:
        assert result is None, f"a rank that is not the root got {result!r}"
        mine.check_untouched()
    mine.check_edges()


def check_broadcast(backend: Backend, case: Case) -> None:
    """In place where there is a tensor, else a new one."""
    is_given = backend.rank == case.root or case.gives_out[backend.rank]
    mine = _place(backend, case, case.shape())
    given = mine.tensor if is_given else None
    result = _call(case, backend, backend.broadcast, given, root=case.root)
    same(result, case.values(case.root, case.shape()), "the result is not the root's tensor")
    assert result is mine.tensor or not is_given, "the result is not the tensor itself"
    mine.check_edges()


def check_all_gather(backend: Backend, case: Case) -> None:
    """Rows of all ranks, whose numbers may differ."""
    mine, expected = _place(backend, case, case.shape(backend.rank)), _gathered(backend, case)
    out = _place_out(backend, case, expected.shape)
    given = None if out is None else out.tensor
    result = _call(case, backend, backend.all_gather, mine.tensor, out=given)
    _check_out(result, out, expected)
    mine.check_untouched()


def check_gather(backend: Backend, case: Case) -> None:
    """Rows of all ranks on the root; None elsewhere."""
    mine, expected = _place(backend, case, case.shape(backend.rank)), _gathered(backend, case)
    is_root = backend.rank == case.root
    out = _place_out(backend, case, expected.shape) if is_root else None
    given = None if out is None else out.tensor
    result = _call(case, backend, backend.gather, mine.tensor, root=case.root, out=given)
    if is_root:
        _check_out(result, out, expected)
    else:
        assert result is None, f"a rank that is not the root got {result!r}"
    mine.check_untouched()


def _gathered(backend: Backend, case: Case) -> Tensor:
    parts = [case.values(rank, case.shape(rank)) for rank in range(backend.size)]
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])


def check_scatter(backend: Backend, case: Case) -> None:
    """Rows of the root's tensor; the others need to know nothing of it."""
    is_root, split = backend.rank == case.root, case.split(case.root)
    mine = _place(backend, case, case.shape(case.root)) if is_root else None
    whole = case.values(case.root, case.shape(case.root))
    expected = _rows(whole, split)[backend.rank]
    out = _place_out(backend, case, expected.shape)
    result = _call(
        case,
        backend,
        backend.scatter,
        None if mine is None else mine.tensor,
        root=case.root,
        out=None if out is None else out.tensor,
        sizes=case.sizes[case.root] if case.sizes and is_root and not case.is_scalar else None,
    )
    _check_out(result, out, expected)
    if mine is not None:
        mine.check_untouched()


def check_reduce_scatter(backend: Backend, case: Case) -> None:
    """Each rank's own rows of the reduction, all of them and nothing else."""
    mine = _place(backend, case, case.shape())
    inputs = [case.values(rank, case.shape()) for rank in range(backend.size)]
    expected = _rows(reduced(case.op, inputs), case.split())[backend.rank]
    out = _place_out(backend, case, expected.shape)
    result = _call(
        case,
        backend,
        backend.reduce_scatter,
        mine.tensor,
        case.op,
        out=None if out is None else out.tensor,
        sizes=case.sizes[0] if case.sizes and not case.is_scalar else None,
    )
    _check_out(result, out, expected)
    mine.check_untouched()


def check_all_to_all(backend: Backend, case: Case) -> None:
    """Part i of every rank's rows ends on rank i."""
    mine = _place(backend, case, case.shape(backend.rank))
    arriving = [
        _rows(case.values(sender, case.shape(sender)), case.split(sender))[backend.rank]
        for sender in range(backend.size)
    ]
    expected = torch.cat(arriving)
    out = _place_out(backend, case, expected.shape)
    result = _call(
        case,
        backend,
        backend.all_to_all,
        mine.tensor,
        out=None if out is None else out.tensor,
        sizes=case.sizes[backend.rank] if case.sizes and not case.is_scalar else None,
    )
    _check_out(result, out, expected)
    mine.check_untouched()


def _rows(tensor: Tensor, split: Sequence[int]) -> list[Tensor]:
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    starts = [sum(split[:rank]) for rank in range(len(split))]
    return [rows[start : start + size] for start, size in zip(starts, split, strict=True)]


def check_message(backend: Backend, case: Case) -> None:
    """Around the ring: each rank sends to the next and receives from the one before."""
    if backend.size == 1:
        return
    before, after = (backend.rank - 1) % backend.size, (backend.rank + 1) % backend.size
    mine = _place(backend, case, case.shape(backend.rank))
    out = _place_out(backend, case, case.shape(before))
    sent = backend.send(mine.tensor, after, tag=case.seed, async_op=True)
    given = None if out is None else out.tensor
    result = _call(case, backend, backend.recv, given, src=before, tag=case.seed)
    assert sent.wait() is None, "a send has a result"
    _check_out(result, out, case.values(before, case.shape(before)))
    mine.check_untouched()


CHECKS: dict[str, Check] = {
    "all_reduce": check_all_reduce,
    "reduce": check_reduce,
    "broadcast": check_broadcast,
    "all_gather": check_all_gather,
    "gather": check_gather,
    "scatter": check_scatter,
    "reduce_scatter": check_reduce_scatter,
    "all_to_all": check_all_to_all,
    "message": check_message,
}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
SAME_SHAPE = ("all_reduce", "reduce", "broadcast", "reduce_scatter")


def num_bytes(case: Case) -> int:
    """The size of the first rank's tensor."""
    return math.prod(case.shape()) * case.dtype.itemsize

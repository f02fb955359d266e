"""The contenders: each makes ready one operation at one size, to be called again and again.

Sizes are totals: what an all-reduce or broadcast carries, what goes into a reduce-scatter, what
comes out of an all-gather. Every contender has memory of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.comm import Backend

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
Call = Callable[[], object]


class Buffers(NamedTuple):
    """What goes in and what comes out; one and the same for operations in place."""

    source: Tensor
    target: Tensor


class Contender(ABC):
    """One way to carry out the operations."""

    operations = OPERATIONS

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def empty(self, numel: int) -> Tensor:
        """Memory for the operands."""
        return torch.empty(numel)

    def buffers(self, operation: str, num_bytes: int) -> Buffers:
        """Operands of ones; every page has been touched."""
        whole, part = num_bytes // 4, num_bytes // 4 // self.size
        if operation == "reduce_scatter":
            return Buffers(self.empty(whole).fill_(1), self.empty(part).fill_(0))
        if operation == "all_gather":
            return Buffers(self.empty(part).fill_(1), self.empty(whole).fill_(0))
        tensor = self.empty(whole).fill_(1)
        return Buffers(tensor, tensor)

    @abstractmethod
    def call(self, operation: str, buffers: Buffers) -> Call:
        """The operation on the operands, ready to be called."""

    def prepare(self, operation: str, num_bytes: int) -> Call:
        """Like `call`, after a first one whose result was checked."""
        buffers = self.buffers(operation, num_bytes)
        call = self.call(operation, buffers)
        call()
        expected = self.size if operation in ("all_reduce", "reduce_scatter") else 1
        if not bool((buffers.target == expected).all()):
            raise RuntimeError(f"{type(self).__name__}: {operation} gave a wrong result")
        # Sums in place would grow for ever.
        for tensor in buffers:
            tensor.zero_()
        return call


class Shoal(Contender):
    """One of our backends, on plain tensors."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.rank, backend.size)
        self._backend = backend

    def call(self, operation: str, buffers: Buffers) -> Call:
        """The backend's own method."""
        source, target = buffers
        backend = self._backend
        calls: dict[str, Call] = {
            "all_reduce": lambda: backend.all_reduce(source),
            "reduce_scatter": lambda: backend.reduce_scatter(source, out=target),
            "all_gather": lambda: backend.all_gather(source, out=target),
            "broadcast": lambda: backend.broadcast(source, root=0),
        }
        return calls[operation]


class ShoalOnItsOwnMemory(Shoal):
    """One of our backends, on memory from `Backend.empty`."""

    def empty(self, numel: int) -> Tensor:
        """Memory that the transport reaches without a copy."""
        return self._backend.empty(numel, torch.float32)


class ShoalInPlace(ShoalOnItsOwnMemory):
    """As above; what comes out takes the place of this rank's part of what went in.

    An addition into other memory first fetches what it overwrites, a third more than it needs.
    """

    operations = ("reduce_scatter",)

    def buffers(self, operation: str, num_bytes: int) -> Buffers:
        """One piece of memory; the part of it is a view."""
        source, target = super().buffers(operation, num_bytes)
        return Buffers(source, source.view(self.size, target.numel())[self.rank])


class TorchGloo(Contender):
    """torch.distributed with Gloo, as its users call it; the default group must be there."""

    def call(self, operation: str, buffers: Buffers) -> Call:
        """The functions that take one tensor in and one out; torch 2.13 gave them new names."""
        import torch.distributed as dist

        source, target = buffers
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(source),
            "reduce_scatter": lambda: scatter(target, source),
            "all_gather": lambda: gather(target, source),
            "broadcast": lambda: dist.broadcast(source, src=0),
        }
        return calls[operation]


class RawMPI(Contender):
    """mpi4py on buffers, as its users call it."""

    def __init__(self, communicator: Any) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator

    def call(self, operation: str, buffers: Buffers) -> Call:
        """The upper-case methods, which do not pickle."""
        from mpi4py import MPI

        communicator = self._communicator
        source, target = (tensor.numpy() for tensor in buffers)
        calls: dict[str, Call] = {
            "all_reduce": lambda: communicator.Allreduce(MPI.IN_PLACE, source),
            "reduce_scatter": lambda: communicator.Reduce_scatter_block(source, target),
            "all_gather": lambda: communicator.Allgather(source, target),
            "broadcast": lambda: communicator.Bcast(source, root=0),
        }
        return calls[operation]


def copy_calls(num_bytes: int) -> dict[str, Call]:
    """Plain copies between private buffers: what the floor is made of.

    There are two, because torch's own is not the fastest: for 64 MiB the C library's, which writes
    past the cache, took 20 ms where torch's took 38. A floor made of the slower one can be beaten
    by whoever uses the faster.
    """
    source, target = torch.ones(2, num_bytes // 4)
    source2, target2 = (tensor.numpy() for tensor in torch.ones(2, num_bytes // 4))
    return {
        "copy by torch": lambda: target.copy_(source),
        "copy by memcpy": lambda: np.copyto(target2, source2),
    }


def floor_s(operation: str, size: int, copy_s: float) -> float:
    """Seconds that an operation must take on `size` ranks, if copying its total takes `copy_s`.

    It is the time for the bytes that each rank must read and write, at the rate at which all ranks
    copy at once. A copy of S bytes reads S and writes S. So does a rank in an all-reduce (it reads
    its slice of all ranks' S, and writes the result to all), in an all-gather, and as a receiver
    of a broadcast. In a reduce-scatter a rank reads its slice of all, S in sum, and writes S / N.

    Two can be somewhat below it. In a broadcast the root copies nothing, so the receivers have the
    memory to themselves; in an all-gather all ranks read the same memory, which caches like.
    """
    return copy_s * (1 + 1 / size) / 2 if operation == "reduce_scatter" else copy_s

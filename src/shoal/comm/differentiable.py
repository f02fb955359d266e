"""Collectives that gradients pass through, as conjugate pairs.

Each function here is the other's backward:

======================  ==========================
forward                 backward
======================  ==========================
`copy` (identity)       `reduce` (all-reduce, sum)
`reduce` (all-reduce)   `copy` (identity)
`split` (keep my rows)  `join` (all-gather)
`join` (all-gather)     `split` (keep my rows)
`gather` (all-gather)   `reduce_scatter`
`reduce_scatter`        `gather` (all-gather)
`exchange` (all-to-all)  `exchange` of the gradients
======================  ==========================

`join` and `gather` look alike and differ in what follows: after `join` every rank goes on
with the same computation on the same values, so each holds the whole gradient already; after
`gather` each rank does something of its own, so the gradients have to be summed.

A backward calls the other function of its pair, so gradients of gradients pass through as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.backend import Backend
from shoal.comm.operation import AllGather, AllToAll
from shoal.comm.operation.partition import offsets, split_sizes

Context = Any
Gradients = tuple[Tensor | None, ...]


def copy(tensor: Tensor, group: Backend) -> Tensor:
    """Hands on a value that is the same on all ranks to work that differs; sums gradients."""
    return _Copy.apply(tensor, group)


def reduce(tensor: Tensor, group: Backend) -> Tensor:
    """Sums partial results; each rank's part gets the whole gradient."""
    return _ReduceFunction.apply(tensor, group)


def split(tensor: Tensor, group: Backend, dim: int = 0) -> Tensor:
    """Keeps this rank's part along ``dim`` of a value that is the same on all ranks."""
    return _SplitFunction.apply(tensor, group, dim, split_sizes(tensor.shape[dim], group.size))


def join(tensor: Tensor, group: Backend, dim: int = 0) -> Tensor:
    """Joins all ranks' parts along ``dim``; what follows is the same on all ranks."""
    return _Join.apply(tensor, group, dim)


def gather(tensor: Tensor, group: Backend, dim: int = 0) -> Tensor:
    """Joins all ranks' parts along ``dim``; what follows differs between ranks."""
    return _GatherFunction.apply(tensor, group, dim)


def reduce_scatter(tensor: Tensor, group: Backend, dim: int = 0) -> Tensor:
    """Sums over ranks and keeps this rank's part along ``dim``."""
    return _ReduceScatterFunction.apply(tensor, group, dim, None)


def exchange(tensor: Tensor, group: Backend, sizes: Sequence[int] | None = None) -> Tensor:
    """All-to-all along the first dimension; ``sizes`` are the rows for each rank."""
    return _Exchange.apply(tensor, group, sizes)


class _Function(torch.autograd.Function):
    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Tensor: ...


class _Copy(_Function):
    @staticmethod
    def forward(ctx: Context, tensor: Tensor, group: Backend) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return reduce(gradients[0], ctx.group), None


class _ReduceFunction(_Function):
    @staticmethod
    def forward(ctx: Context, tensor: Tensor, group: Backend) -> Tensor:
        ctx.group = group
        total: Tensor = group.all_reduce(tensor.clone())
        return total

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return copy(gradients[0], ctx.group), None


class _SplitFunction(_Function):
    @staticmethod
    def forward(
        ctx: Context, tensor: Tensor, group: Backend, dim: int, sizes: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return tensor.narrow(dim, offsets(sizes)[group.rank], sizes[group.rank]).clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return join(gradients[0], ctx.group, ctx.dim), None, None, None


class _Join(_Function):
    @staticmethod
    def forward(ctx: Context, tensor: Tensor, group: Backend, dim: int) -> Tensor:
        joined, sizes = _all_gather(tensor, group, dim)
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return joined

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return _SplitFunction.apply(gradients[0], ctx.group, ctx.dim, ctx.sizes), None, None


class _GatherFunction(_Join):
    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return _ReduceScatterFunction.apply(gradients[0], ctx.group, ctx.dim, ctx.sizes), None, None


class _ReduceScatterFunction(_Function):
    @staticmethod
    def forward(
        ctx: Context, tensor: Tensor, group: Backend, dim: int, sizes: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return gather(gradients[0], ctx.group, ctx.dim), None, None, None


class _Exchange(_Function):
    @staticmethod
    def forward(
        ctx: Context, tensor: Tensor, group: Backend, sizes: Sequence[int] | None
    ) -> Tensor:
        operation = AllToAll(tensor, None, sizes, (group.rank, group.size))
        arrived: Tensor = group.run(operation)
        # The gradients go back the way the rows came.
        ctx.group, ctx.arrived = group, operation.rows
        return arrived

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        return exchange(gradients[0], ctx.group, ctx.arrived), None, None


def _all_gather(tensor: Tensor, group: Backend, dim: int) -> tuple[Tensor, list[int]]:
    """Joins along any dimension; returns the joined tensor and every rank's length."""
    operation = AllGather(tensor.transpose(0, dim).contiguous(), None)
    joined: Tensor = group.run(operation)
    return joined.transpose(0, dim).contiguous(), list(operation.rows)


def _reduce_scatter(
    tensor: Tensor, group: Backend, dim: int, sizes: Sequence[int] | None
) -> Tensor:
    rows = tensor.transpose(0, dim).contiguous()
    part: Tensor = group.reduce_scatter(rows, sizes=sizes)
    return part.transpose(0, dim).contiguous()

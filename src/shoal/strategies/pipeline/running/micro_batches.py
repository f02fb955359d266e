"""A batch in parts, one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal.comm import Backend, ReduceOp
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.strategies.training import count_items


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
        inputs: Its rows of the inputs.
        targets: Its rows of the targets.
        share: Its part of the batch's items, from 0 to 1.
    """

    inputs: Any
    targets: Any
    share: float


def count_parts(inputs: Any, most: int, data: Backend) -> int:
    """How many parts the batches of all pipelines are cut into: no more than any of them has rows.

    Pipelines side by side meet in every pass, for parameters that they share out. One whose batch
    is empty goes along with the others.
    """
    own = min(most, count_items(inputs)) or most
    if data.size == 1:
        return own
    return int(data.all_reduce(torch.tensor(own, device=data.device), ReduceOp.MIN))


def split(inputs: Any, targets: Any, count: int) -> list[MicroBatch]:
    """Cuts every tensor that has the batch's rows.

    Example:
        >>> [part.inputs.tolist() for part in split(torch.arange(5), None, 2)]
        [[0, 1, 2], [3, 4]]
    """
    num_rows = count_items(inputs)
    sizes = split_sizes(num_rows, count)
    return [
        MicroBatch(
            _rows(inputs, num_rows, start, size),
            _rows(targets, num_rows, start, size),
            size / num_rows if num_rows else 1 / count,
        )
        for start, size in zip(offsets(sizes), sizes, strict=False)
    ]


def _rows(tree: Any, num_rows: int, start: int, size: int) -> Any:
    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
        return leaf[start : start + size] if has_rows else leaf

    return tree_map(cut, tree)

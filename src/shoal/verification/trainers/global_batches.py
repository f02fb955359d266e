"""Global batches, and each rank's rows of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor

from shoal.comm.operation.partition import offsets, split_sizes
from shoal.strategies.training import count_items
from shoal.torch_internals.trees import tree_map

Batch = tuple[Any, Any]


def take(batches: Iterable[Any], count: int) -> list[Batch]:
    """The first ``count`` batches, from the beginning again where there are fewer."""
    taken = [_pair(batch) for batch in islice(batches, count)]
    if not taken:
        raise ValueError("build() must return at least one batch to train on; got none")
    return [taken[index % len(taken)] for index in range(count)]


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"a batch must be a pair (inputs, targets); got {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        )
    return batch[0], batch[1]


def share(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """A rank's contiguous rows of every tensor that has the batch's; other things whole.

    Example:
        >>> share((torch.arange(5), torch.arange(5)), 0, 2)
        (tensor([0, 1, 2]), tensor([0, 1, 2]))
    """
    num_rows = count_items(batch[0])
    low, high = offsets(split_sizes(num_rows, num_ranks))[rank : rank + 2]

    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
        return leaf[low:high] if has_rows else leaf

    return tree_map(cut, batch[0]), tree_map(cut, batch[1])

"""Whether a block gives the same when it is called again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.torch_internals.trees import tree_leaves

_NUM_ELEMENTS = 1024
"""Of each result so many elements are kept."""


class SameResult:
    """Some elements of what one call of a block gave, and what its second call must give.

    A block that counts its calls, draws from a generator of its own or goes by an object that it
    was given has other activations in its second call, and gradients that belong to neither.
    """

    def __init__(self, name: str) -> None:
        """``name`` is the block's."""
        self._name = name
        self._first: list[Tensor] | None = None

    @torch.no_grad()
    def look(self, result: Any) -> None:
        """Keeps elements of the first result, and compares those of the next ones with them."""
        some = list(_elements(result))
        if self._first is None:
            self._first = some
            return
        pairs = zip(self._first, some, strict=False)
        if len(some) != len(self._first) or not all(_are_close(*pair) for pair in pairs):
            raise RuntimeError(
                f"block {self._name!r} gave another result when backward called it again, so its "
                "gradients would be wrong. It depends on something that has changed in between and "
                "is not put back: an attribute (as a counter), a generator of its own, or an "
                "object that it was given and that was written to. Leave it out of the blocks of "
                "activations=, or give it what it needs as tensors among its arguments"
            )


def _elements(result: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(result):
        if type(leaf) is Tensor and leaf.requires_grad and leaf.layout is torch.strided:
            flat = leaf.detach().reshape(-1)
            yield flat[:: max(1, flat.numel() // _NUM_ELEMENTS)].clone()
        elif is_dataclass(leaf):  # torch knows of no tensors in it
            yield from _elements(list(vars(leaf).values()))


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Up to rounding: not all kernels of GPUs give the same bits twice."""
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    precision = torch.finfo(first.dtype).eps ** 0.5
    largest = first.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if first.numel() else 0.0
    return torch.allclose(first, second, rtol=precision, atol=precision * largest, equal_nan=True)

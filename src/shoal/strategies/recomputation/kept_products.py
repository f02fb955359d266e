"""The results of matrix products that a block keeps while it computes the rest again.

Two modes see every operation of a block below autograd: one in its first call, which keeps results,
and one in its second, which hands them out in the same order instead of computing them. They look
at products only, so what a strategy does inside of a block (gathering parameters, say) may differ
between the two calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.strategies.recomputation.stores.store import Store
from shoal.torch_internals.tensors import DispatchMode, detached_below_autograd, version_of

# Products with weights take the most time for the memory of their results. Those of attention
# (`bmm`) take much memory, and are computed again.
_NAMES = ("mm", "addmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
_KEPT = frozenset(
    getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)
)


class _Product(NamedTuple):
    """One result, or what stands for it, with what it was computed from."""

    function: Any
    shapes: tuple[torch.Size, ...]
    result: Any
    version: int

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written to it; what was moved is safe."""
        return not isinstance(self.result, Tensor) or version_of(self.result) == self.version

    def is_of(self, function: Any, args: Any) -> bool:
        """Whether it is what a call gives."""
        return self.function is function and self.shapes == _shapes(args)


class KeepingProducts(DispatchMode):
    """Around the first call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[_Product] = []
        self.store = Store()

    def move(self, store: Store, place: str) -> list[Any]:
        """After the first call: gives the results to a store; returns what stands for them."""
        if store.takes_products:
            self.store = store
            self.products = [
                each._replace(result=store.put(each.result, place)) if each.is_intact else each
                for each in self.products
            ]
        return [each.result for each in self.products]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keeps what products give."""
        result = func(*args, **(kwargs or {}))
        if func in _KEPT:
            kept = detached_below_autograd(result)
            self.products.append(_Product(func, _shapes(args), kept, version_of(kept)))
        return result


class ReusingProducts(DispatchMode):
    """Around the second call. There may be several, if backward runs several times."""

    def __init__(self, keeping: KeepingProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._store, self._next = keeping.products, keeping.store, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes no product twice, unless its result was overwritten."""
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        index, self._next = self._next, self._next + 1
        if index >= len(self._products) or not self._products[index].is_of(func, args):
            raise RuntimeError(
                "a block does not compute in backward what it computed in forward: with "
                'activations="selective" it must do the same matrix products in the same order. '
                "Does it depend on something that has changed in between?"
            )
        product = self._products[index]
        if not product.is_intact:
            return func(*args, **(kwargs or {}))
        return detached_below_autograd(self._store.get(product.result))


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(arg.shape for arg in args if isinstance(arg, Tensor))

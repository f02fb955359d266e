"""The results of matrix products and fused attention that a block keeps, to compute only the rest.

Two modes see every operation of a block below autograd: one in its first call, which keeps results,
and one in its second, which hands them out in the same order instead of computing them. They look
at these operations only, so what a strategy does inside of a block (gathering parameters, say) may
differ between the two calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.strategies.recomputation.stores.store import Store
from shoal.torch_internals.tensors import (
    DispatchMode,
    detached_below_autograd,
    schema_of,
    storage_id,
    version_of,
)


def _operation(name: str) -> Any:
    """None where this version of torch does not have it."""
    found = getattr(torch.ops.aten, name, None)
    return found and found.default


# Products with weights take the most time for the memory of their results. Those of attention that
# is not fused (`bmm`) take much memory, and are computed again.
_PRODUCTS = ("mm", "addmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
_KEPT = frozenset(filter(None, map(_operation, _PRODUCTS)))

# The results of fused attention are as small as those of a product. With dropout it is computed
# again: skipping it would leave the random generator behind. The numbers are where dropout is said.
_ATTENTION = {
    _operation(name): position
    for name, position in (
        ("_scaled_dot_product_flash_attention", 3),
        ("_scaled_dot_product_flash_attention_for_cpu", 3),
        ("_scaled_dot_product_fused_attention_overrideable", 4),
        ("_scaled_dot_product_efficient_attention", 5),
        ("_scaled_dot_product_cudnn_attention", 5),
    )
}


def _is_kept(function: Any, args: Any) -> bool:
    if function not in _ATTENTION:
        return function in _KEPT
    return not any(args[_ATTENTION[function] :][:1])


class _Kept(NamedTuple):
    """What one operation gave, or what stands for it, with what it was computed from.

    Attributes:
        results: Tensors, and what else an operation with several results gives.
        versions: How often each tensor had been written to.
    """

    function: Any
    shapes: tuple[torch.Size, ...]
    results: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, function: Any, args: Any, given: Any) -> _Kept:
        """``given``: one tensor, or several results."""
        results = tuple(
            detached_below_autograd(each) if isinstance(each, Tensor) else each
            for each in (given if isinstance(given, tuple | list) else (given,))
        )
        versions = tuple(version_of(each) if isinstance(each, Tensor) else 0 for each in results)
        return cls(function, _shapes(args), results, versions)

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written to it; what was moved is safe."""
        pairs = zip(self.results, self.versions, strict=True)
        is_same = (not isinstance(each, Tensor) or version_of(each) == was for each, was in pairs)
        return bool(self.results) and all(is_same)

    def lost(self) -> _Kept:
        """Without its results, which have been overwritten."""
        return self._replace(results=(), versions=())

    def is_of(self, function: Any, args: Any) -> bool:
        """Whether it is what a call gives."""
        return self.function is function and self.shapes == _shapes(args)

    def moved(self, store: Store, place: str) -> _Kept:
        """The same with its tensors in a store."""
        results = tuple(
            store.put(each, place) if isinstance(each, Tensor) else each for each in self.results
        )
        return self._replace(results=results)

    def taken(self, store: Store) -> Any:
        """What the operation gave."""
        results = [store.get(each) for each in self.results]
        found = [detached_below_autograd(e) if isinstance(e, Tensor) else e for e in results]
        return tuple(found) if self.function in _ATTENTION else found[0]


class KeepingProducts(DispatchMode):
    """Around the first call.

    A block that takes a gradient inside of its forward is called again before that has ended, and
    then goes on behind what is kept so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[_Kept] = []
        self._at: dict[int, int] = {}
        self.store = Store()
        self.has_ended = False
        self.is_called_again = False

    def __exit__(self, *error: Any) -> None:
        self.has_ended = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def results(self) -> list[Any]:
        """All tensors that are kept, or what stands for them."""
        return [result for each in self.products for result in each.results]

    def move(self, store: Store, place: str) -> None:
        """After the first call: gives the results to a store."""
        if store.takes_products:
            self.store = store
            self.products = [
                each.moved(store, place) if each.is_intact else each for each in self.products
            ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keeps what products give, until something writes to it."""
        result = func(*args, **(kwargs or {}))
        if self.is_called_again:
            return result
        if _is_kept(func, args):
            product = _Kept.of(func, args, result)
            self._at |= {storage_id(each): len(self.products) for each in _tensors(product.results)}
            self.products.append(product)
        elif self._at and schema_of(func).is_mutable:
            self._lose(func, args, kwargs or {})
        return result

    def _lose(self, func: Any, args: Any, kwargs: Any) -> None:
        """Versions do not tell of all writes: `unsafe_chunk` (in a GRU) and `.data` hide some."""
        for written in _tensors(_written(func, args, kwargs)):
            index = self._at.pop(storage_id(written), None)
            if index is not None:
                self.products[index] = self.products[index].lost()


class ReusingProducts(DispatchMode):
    """Around the second call. There may be several, if backward runs several times."""

    def __init__(self, keeping: KeepingProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeping, self._next = keeping, 0

    def __enter__(self) -> ReusingProducts:
        self._keeping.is_called_again = True
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._keeping.is_called_again = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes no product twice, unless its result was overwritten."""
        if not _is_kept(func, args):
            return func(*args, **(kwargs or {}))
        products, index = self._keeping.products, self._next
        if index == len(products) and not self._keeping.has_ended:
            return func(*args, **(kwargs or {}))
        self._next += 1
        if index >= len(products) or not products[index].is_of(func, args):
            raise RuntimeError(
                "a block does not compute in backward what it computed in forward: with "
                'activations="selective" it must do the same matrix products in the same order. '
                "Does it depend on something that has changed in between?"
            )
        product = products[index]
        if not product.is_intact:
            return func(*args, **(kwargs or {}))
        return product.taken(self._keeping.store)


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """What an operation writes to."""
    for index, argument in enumerate(schema_of(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from given if isinstance(given, list | tuple) else (given,)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(arg.shape for arg in args if isinstance(arg, Tensor))

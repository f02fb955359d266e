"""Values that another rank has: they can be looked at, and computed with as long as nobody asks.

[Note: absent values]
A rank runs the model's own forward, with the parts of other ranks left out. What these would have
returned is *absent*: it has a shape, a dtype and a device, and what is computed from it is absent
too. That goes on until a part of this rank wants such a value, or the model returns it. While the
ranks *learn* the way through a model, the values are there, hidden behind the absent ones, and the
learner notes whose are wanted. From then on these travel, and everything else stays absent: a rank
that wants it nevertheless gets an error, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shoal.errors import ShoalError
from shoal.system.rank_names import list_names


class Source(NamedTuple):
    """Where a value comes from: a leaf of what a call returned, or a parameter."""

    call: int
    """The number of the call in forward, or -1 for a parameter."""
    leaf: int
    name: str
    """The unit's or the parameter's."""


class AbsentValue(torch.Tensor):
    """A tensor of another rank; see [Note: absent values]."""

    sources: frozenset[Source]
    shadow: Tensor
    """The same without memory, to find out shapes with."""
    behind: Tensor | None
    """Its value, while learning."""
    learner: Learner | None

    @staticmethod
    def __new__(
        cls,
        shadow: Tensor,
        device: torch.device,
        sources: frozenset[Source],
        learner: Learner | None = None,
        behind: Tensor | None = None,
    ) -> AbsentValue:
        """``shadow`` is on the meta device; this pretends to be on ``device``."""
        value: AbsentValue = torch.Tensor._make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=device,
        )
        value.shadow, value.sources, value.learner, value.behind = shadow, sources, learner, behind
        return value

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Computes shapes, or while learning hidden values."""
        kwargs = kwargs or {}
        if func.overloadpacket in _LIKE:
            return _like(func, args, kwargs)
        absent = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentValue)]
        learner = next((value.learner for value in absent if value.learner), None)
        writes_real = _writes_real(func, args, kwargs)
        if learner is not None:
            return _learn(func, args, kwargs, absent, learner, is_use=writes_real)
        if writes_real or func in _VALUES:
            raise absent_error(absent)
        return _shadowed(func, args, kwargs, absent)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Shape and origin."""
        names = ", ".join(sorted({source.name for source in self.sources}))
        return f"AbsentValue(shape={tuple(self.shape)}, dtype={self.dtype}, from={names!r})"


class Learner:
    """Notes which absent values are wanted, and has them."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        """``fetch(name)`` returns a parameter of another rank."""
        self.used: set[Source] = set()
        self.written: set[Source] = set()
        """Whose values, or views of them, the model writes into between its units."""
        self._fetch = fetch

    def value_of(self, value: AbsentValue) -> Tensor:
        """The hidden value."""
        if value.behind is None:
            found = [self._fetch(source.name) for source in sorted(value.sources)]
            if len(found) > 1:  # computed before there was a learner
                raise absent_error([value])
            value.behind = found[0]
        return value.behind

    def use(self, value: AbsentValue) -> Tensor:
        """The hidden value for somebody who wants it; it is a leaf of a graph of its own."""
        self.used |= value.sources
        real = self.value_of(value).detach()
        return writable(real.requires_grad_(value.requires_grad))


class _Writable(torch.autograd.Function):
    """The identity in the same memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Writing into what `detach` returns is seen in the version of the original."""
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The same."""
        return gradients[0]


def writable(leaf: Tensor) -> Tensor:
    """Something that models may write into, as into any result: leaves that want gradients are not.

    Who uses a value of another rank expects the result of an operation.
    """
    return _Writable.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]


def absent_like(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: Source
) -> AbsentValue:
    """An absent value of some shape."""
    shadow = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return AbsentValue(shadow, device, frozenset([source]))


def hidden(real: Tensor, source: Source, learner: Learner, *, needs_grad: bool) -> AbsentValue:
    """An absent value with its real one behind it."""
    shadow = torch.empty_like(real, device="meta")
    value = AbsentValue(shadow, real.device, frozenset([source]), learner, real)
    return writable(value.requires_grad_(needs_grad))  # type: ignore[return-value]


def absent_error(values: Sequence[AbsentValue]) -> ShoalError:
    """For whoever wants a value that did not travel."""
    sources = {source for value in values for source in value.sources}
    computed = sorted({source.name for source in sources if source.call >= 0})
    if not computed:
        owned = list_names(sorted(source.name for source in sources))
        return ShoalError(
            f"other ranks of the pipeline have {owned}: call the wrapped model itself, on every "
            "rank, or use its parts inside of model.full_parameters(). A loss that uses parameters "
            "of the model belongs into its forward: call train_step((inputs, targets), targets, "
            "lambda loss, _: loss) with a forward(inputs, targets) that returns the loss"
        )
    return ShoalError(
        f"this stage of the pipeline needs a value that {list_names(computed)} computed on another "
        "rank, which it did not need when the way through the model was learned: which parts of a "
        "model use which values must not depend on the numbers in a batch. Return such values from "
        "one unit to the next, or cut the model elsewhere (cut=)"
    )


def _learn(
    func: Any, args: Any, kwargs: Any, absent: Sequence[AbsentValue], learner: Learner, is_use: bool
) -> Any:
    is_write = func._schema.is_mutable
    if is_use or is_write or func in _VALUES or _needs_values(func, args, kwargs):
        for value in absent:
            learner.used |= value.sources
    sources = frozenset().union(*(value.sources for value in absent))

    def real(leaf: Any) -> Any:
        return learner.value_of(leaf) if isinstance(leaf, AbsentValue) else leaf

    result = func(*tree_map(real, args), **tree_map(real, kwargs))
    if is_write:
        learner.written |= sources
        for value in absent:
            value.sources |= sources
        return _returned(func, args, kwargs)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or is_use:
            return leaf
        shadow = torch.empty_like(leaf, device="meta")
        return AbsentValue(shadow, leaf.device, sources, learner, leaf)

    return tree_map(wrap, result)


def _shadow(leaf: Any) -> Any:
    if isinstance(leaf, AbsentValue):
        return leaf.shadow
    if isinstance(leaf, Tensor):
        return torch.empty_like(leaf, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _needs_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether even the shape of a result depends on values, as when sequences are packed."""
    try:
        func(*tree_map(_shadow, args), **tree_map(_shadow, kwargs))
    except Exception:  # whatever an operation raises that finds no values
        return True
    return False


def _shadowed(func: Any, args: Any, kwargs: Any, absent: Sequence[AbsentValue]) -> Any:
    device = kwargs.get("device", absent[0].device)
    sources = frozenset().union(*(value.sources for value in absent))
    try:
        result = func(*tree_map(_shadow, args), **tree_map(_shadow, kwargs))
    except Exception as error:  # its shape depends on values
        raise absent_error(absent) from error
    if func._schema.is_mutable:
        return _returned(func, args, kwargs)
    return tree_map(
        lambda leaf: AbsentValue(leaf, device, sources) if isinstance(leaf, Tensor) else leaf,
        result,
    )


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that writes into its arguments returns: the one it wrote into."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return None


def _writes_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes into a tensor that is here."""
    if not func._schema.is_mutable:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            if any(not isinstance(leaf, AbsentValue) for leaf in tree_leaves(written)):
                return True
    return False


_aten = torch.ops.aten
_VALUES = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_NEW = {_aten.new_zeros, _aten.new_ones, _aten.new_empty, _aten.new_full}
_LIKE = _NEW | {_aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like}


def _like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What depends on a tensor's shape, dtype and device only is no absent value."""
    model, *rest = args
    stand_in = torch.empty((), dtype=model.dtype, device=model.device)
    if func.overloadpacket not in _NEW:
        stand_in = stand_in.expand(model.shape)
    result: Tensor = func(stand_in, *rest, **kwargs)
    return result

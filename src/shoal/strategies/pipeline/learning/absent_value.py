"""Values that another rank has: one can compute with them as long as shapes are enough.

[Note: absent values]
A rank runs the model's own forward, with the units of other ranks left out. What these would have
returned is *absent*: it has a shape, a dtype and a device, and what is computed from it is absent
too. That goes on until a unit of this rank uses such a value, or the model returns it. While the
ranks learn the route through a model, absent values have their real values hidden in them, and a
`ValueRecorder` notes which of them are used. From then on the used values travel, and all others
stay absent: a rank that needs one of these nevertheless gets an error, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.route import ValueId
from shoal.system.rank_names import list_names
from shoal.torch_internals.tensors import make_wrapper, no_torch_function, schema_of
from shoal.torch_internals.trees import tree_leaves, tree_map


class AbsentValue(torch.Tensor):
    """A tensor of another rank; see [Note: absent values]."""

    sources: frozenset[ValueId]
    """The values that it was computed from."""
    meta: Tensor
    """The same on the meta device: it has a shape and no memory."""
    hidden: Tensor | None
    """Its real value, while the route is learned."""
    recorder: ValueRecorder | None

    @staticmethod
    def __new__(
        cls,
        meta: Tensor,
        device: torch.device,
        sources: frozenset[ValueId],
        recorder: ValueRecorder | None = None,
        hidden: Tensor | None = None,
    ) -> AbsentValue:
        """``meta`` has the shape; the value claims to be on ``device``."""
        value: AbsentValue = make_wrapper(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        value.meta, value.sources, value.recorder, value.hidden = meta, sources, recorder, hidden
        return value

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _LIKE:
            return _like(func, args, kwargs)
        absent = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentValue)]
        recorder = next((value.recorder for value in absent if value.recorder), None)
        writes_real = any(
            not isinstance(leaf, AbsentValue) for leaf in tree_leaves(_written(func, args, kwargs))
        )
        if recorder is not None:
            return _compute_hidden(func, args, kwargs, absent, recorder, is_use=writes_real)
        if writes_real or func in _VALUES:
            raise absent_error(absent)
        return _compute_shapes(func, args, kwargs, absent)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        names = ", ".join(sorted({source.name for source in self.sources}))
        return f"AbsentValue(shape={tuple(self.shape)}, dtype={self.dtype}, from={names!r})"


class ValueRecorder:
    """Notes which absent values are used, and has their real values."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        """``fetch(name)`` returns a parameter of another rank."""
        self.used: set[ValueId] = set()
        self.written: set[ValueId] = set()
        """The values that the model writes into between its units, directly or through views."""
        self._fetch = fetch

    def value_of(self, value: AbsentValue) -> Tensor:
        """The real value."""
        if value.hidden is None:
            found = [self._fetch(source.name) for source in sorted(value.sources)]
            if len(found) > 1:  # computed before the route was learned
                raise absent_error([value])
            value.hidden = found[0]
        return value.hidden

    def use(self, value: AbsentValue) -> Tensor:
        """Notes that a value is used; returns the real one, the leaf of a new graph."""
        self.used |= value.sources
        real = self.value_of(value).detach()
        return writable(real.requires_grad_(value.requires_grad))


class _Writable(torch.autograd.Function):
    """The identity in the same memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()  # shares the version counter: writes are seen in the original

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def writable(leaf: Tensor) -> Tensor:
    """The same value as the result of an operation, which models may write into.

    Autograd refuses writes into leaves that require gradients.
    """
    return _Writable.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]


def absent_like(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: ValueId
) -> AbsentValue:
    """An absent value of some shape."""
    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return AbsentValue(meta, device, frozenset([source]))


def hide(
    real: Tensor, source: ValueId, recorder: ValueRecorder, *, needs_grad: bool
) -> AbsentValue:
    """An absent value with its real one hidden in it."""
    meta = torch.empty_like(real, device="meta")
    value = AbsentValue(meta, real.device, frozenset([source]), recorder, real)
    return writable(value.requires_grad_(needs_grad))  # type: ignore[return-value]


def absent_error(values: Sequence[AbsentValue]) -> ShoalError:
    """For the use of a value that did not travel."""
    sources = {source for value in values for source in value.sources}
    computed = sorted({source.name for source in sources if source.is_computed})
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
        "rank, which it did not need when the route through the model was learned: which parts of "
        "a model use which values must not depend on the numbers in a batch. Return such values "
        "from one unit to the next, or cut the model elsewhere (cut=)"
    )


def _compute_hidden(
    func: Any,
    args: Any,
    kwargs: Any,
    absent: Sequence[AbsentValue],
    recorder: ValueRecorder,
    is_use: bool,
) -> Any:
    """Computes with hidden values; the result is absent unless the operation uses the values."""
    is_write = schema_of(func).is_mutable
    if is_use or is_write or func in _VALUES or _needs_values(func, args, kwargs):
        for value in absent:
            recorder.used |= value.sources
    sources = frozenset().union(*(value.sources for value in absent))

    def real(leaf: Any) -> Any:
        return recorder.value_of(leaf) if isinstance(leaf, AbsentValue) else leaf

    result = func(*tree_map(real, args), **tree_map(real, kwargs))
    if is_write:
        recorder.written |= sources
        for value in absent:
            value.sources |= sources
        return _written(func, args, kwargs)[0]

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or is_use:
            return leaf
        meta = torch.empty_like(leaf, device="meta")
        return AbsentValue(meta, leaf.device, sources, recorder, leaf)

    return tree_map(wrap, result)


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, AbsentValue):
        return leaf.meta
    if isinstance(leaf, Tensor):
        return torch.empty_like(leaf, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _needs_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the shape of a result depends on values, as when sequences are packed."""
    try:
        func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    except Exception:  # operations raise various errors on the meta device
        return True
    return False


def _compute_shapes(func: Any, args: Any, kwargs: Any, absent: Sequence[AbsentValue]) -> Any:
    """Computes on the meta device; the result is absent."""
    device = kwargs.get("device", absent[0].device)
    sources = frozenset().union(*(value.sources for value in absent))
    try:
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    except Exception as error:  # the shape of the result depends on values
        raise absent_error(absent) from error
    if schema_of(func).is_mutable:
        return _written(func, args, kwargs)[0]
    return tree_map(
        lambda leaf: AbsentValue(leaf, device, sources) if isinstance(leaf, Tensor) else leaf,
        result,
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes into; it returns the first of them."""
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


_aten = torch.ops.aten
_VALUES = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_NEW = {_aten.new_zeros, _aten.new_ones, _aten.new_empty, _aten.new_full}
_LIKE = _NEW | {_aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like}


def _like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The result is real: it depends on the argument's shape, dtype and device only."""
    model, *rest = args
    stand_in = torch.empty((), dtype=model.dtype, device=model.device)
    if func.overloadpacket not in _NEW:
        stand_in = stand_in.expand(model.shape)
    result: Tensor = func(stand_in, *rest, **kwargs)
    return result

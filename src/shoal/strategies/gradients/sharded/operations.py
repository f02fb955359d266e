"""What can be computed of gradients of which each rank holds a part, and where.

[Note: element by element]
An operation that torch tags as pointwise, or that only fills and copies, needs no more than this
rank's elements, if its other operands are gradients that are cut alike, numbers, or
whole tensors of which the same elements can be taken. So do the foreach forms of these, index by
index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategies.gradients.sharded.numbers import NUMBERS
from shoal.strategies.gradients.sharded.part import GradientPart, PartLayout, PartTensor
from shoal.torch_internals.tensors import schema_of
from shoal.torch_internals.trees import tree_leaves, tree_map
from shoal.torch_support.fingerprint import checksum

aten = torch.ops.aten

# Torch does not tag these as pointwise.
_FILLS = {
    aten.copy_, aten.fill_, aten.zero_, aten.masked_fill, aten.masked_fill_, aten._to_copy,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like,
}  # fmt: skip
_NOT_EACH = {"norm", "max", "mm", "powsum"}
_FOREACH = "_foreach_"


def perform(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Does what was asked of tensors some of which are `PartTensor`."""
    if any(each.replacement is not None for each in _parts_among((args, kwargs))):
        return _on_replacements(func, args, kwargs)
    packet = func.overloadpacket
    if packet in (aten.detach, aten.alias):
        return type(args[0])(args[0].part, args[0])
    if packet in NUMBERS:
        result = NUMBERS[packet](func, args, kwargs)
        return _on_wholes(func, args, kwargs) if result is NotImplemented else result
    if func.__name__.startswith(_FOREACH) and _foreach_name(func) not in _NOT_EACH:
        return _on_lists(func, args, kwargs)
    if _is_elementwise(func) and _can_be_local(func, args, kwargs):
        return _on_parts(func, args, kwargs)
    if _needs_no_values(func):
        return _on_empty(func, args, kwargs)
    return _on_wholes(func, args, kwargs)


def _parts_among(value: Any) -> list[PartTensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, PartTensor)]


def _foreach_name(func: Any) -> str:
    return str(func.overloadpacket.__name__).removeprefix(_FOREACH).rstrip("_")


# Element by element -----------------------------------------------------------------------


def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _FILLS


def _can_be_local(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this rank's elements are enough; see [Note: element by element]."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    parts = [tensor for tensor in tensors if isinstance(tensor, PartTensor)]
    layout = parts[0].part.layout
    changed = _changed(func, args, kwargs)
    moves = kwargs.get("device") not in (None, parts[0].device)
    return (
        not moves
        and all(part.part.layout.conforms(layout) for part in parts)
        and all(_fits(tensor, parts[0], bool(changed)) for tensor in tensors)
        and all(isinstance(each, PartTensor) and not each.part.is_kept for each in changed)
    )


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """What the operation writes to."""
    names = [arg for arg in schema_of(func).arguments if arg.alias_info and arg.alias_info.is_write]
    indices = {arg.name: index for index, arg in enumerate(schema_of(func).arguments)}
    found = [
        args[indices[arg.name]] if indices[arg.name] < len(args) else kwargs[arg.name]
        for arg in names
    ]
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _fits(tensor: Tensor, part: PartTensor, is_changed: bool) -> bool:
    if isinstance(tensor, PartTensor):
        return True
    if not part.dim():  # which dtype the result has depends on numbers without dimensions, too
        return not tensor.dim() and (is_changed or tensor.dtype is part.dtype)
    try:
        return bool(torch.broadcast_shapes(tensor.shape, part.shape) == part.shape)
    except RuntimeError:
        return False


def _on_parts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first = _parts_among((args, kwargs))[0]
    layout = first.part.layout
    kwargs.pop("memory_format", None)  # parts are flat
    changed = _changed(func, args, kwargs)
    local_args, local_kwargs = tree_map(lambda leaf: _local(leaf, layout), (args, kwargs))
    result = func(*local_args, **local_kwargs)
    _note(func, args, kwargs)
    return changed[0] if changed else _spread(result, first, _described(func, args, kwargs))


def _note(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Remembers what is written to gradients; see [Note: edits of gradients]."""
    changed = [each for each in _changed(func, args, kwargs) if isinstance(each, PartTensor)]
    for each in changed:
        each.part.note(_described(func, args, kwargs))


def _described(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The operation and its other operands; see [Note: edits of gradients]."""
    others = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, PartTensor)]
    values = [int(checksum(leaf)) if _can_be_read(leaf) else leaf for leaf in others]
    return f"{func} {[each for each in values if isinstance(each, bool | int | float | complex)]}"


def _can_be_read(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cpu and leaf.layout is torch.strided


def _local(leaf: Any, layout: PartLayout) -> Any:
    if isinstance(leaf, PartTensor):
        return leaf.part.values()
    if isinstance(leaf, Tensor) and leaf.dim():
        return layout.take(leaf)
    return leaf


def _spread(result: Any, like: PartTensor, edit: str) -> Any:
    """Results of a part are parts."""

    def spread(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = GradientPart.of(like.part.layout, leaf, like.part.after(edit))
        return type(like)(made, leaf)

    return tree_map(spread, result)


# Lists ------------------------------------------------------------------------------------


def _on_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One call for all that can be local, and one each for the others."""
    length = len(args[0])
    rows = [_row(args, index) for index in range(length)]
    is_local = [not _parts_among(row) or _can_be_local(func, row, {}) for row in rows]
    results: list[Any] = [None] * length
    chosen = [index for index in range(length) if is_local[index]]
    if chosen:
        found = func(*_local_columns(args, rows, chosen), **kwargs)
        for index, result in zip(chosen, found or [None] * len(chosen), strict=True):
            parts = _parts_among(rows[index])
            if parts:
                _note(func, rows[index], kwargs)
                result = _spread(result, parts[0], _described(func, rows[index], kwargs))
            results[index] = result
    for index in range(length):
        if not is_local[index]:
            found = _on_wholes(func, rows[index], kwargs)
            results[index] = found[0] if found else None
    return None if schema_of(func).is_mutable else results


def _row(args: Sequence[Any], index: int) -> list[Any]:
    """The arguments of one index, each in a list of its own."""
    return [[arg[index]] if isinstance(arg, list | tuple) else arg for arg in args]


def _local_columns(
    args: Sequence[Any], rows: Sequence[Sequence[Any]], chosen: Sequence[int]
) -> list[Any]:
    columns: list[Any] = []
    for arg in args:
        if not isinstance(arg, list | tuple):
            columns.append(arg)
            continue
        column = []
        for index in chosen:
            parts = _parts_among(rows[index])
            column.append(_local(arg[index], parts[0].part.layout) if parts else arg[index])
        columns.append(column)
    return columns


# Wholes -----------------------------------------------------------------------------------


def _on_wholes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gathers what the operation needs; see [Note: gathered gradients]."""
    if torch.Tag.inplace_view in func.tags:
        name = _parts_among((args, kwargs))[0].part.layout.name
        raise ShoalError(
            f"{func} would change the shape or the memory of the gradient of {name}, of which each "
            "rank holds a part: assign another one, parameter.grad = ..."
        )
    changed = {id(each) for each in _changed(func, args, kwargs)}
    given: dict[int, PartTensor] = {}

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, PartTensor):
            return leaf
        # What is only written to, and was gathered already, need not be gathered again.
        is_here = id(leaf) in changed and leaf.part.is_kept
        leaf.part.note_writes()
        found = leaf.part.here() if is_here else leaf.part.whole(func.__name__)
        given[id(found)] = leaf
        wholes.append(found)
        return found

    wholes: list[Tensor] = []
    plain_args, plain_kwargs = tree_map(whole, (args, kwargs))
    _note(func, args, kwargs)
    result = func(*plain_args, **plain_kwargs)
    for leaf in given.values():
        leaf.part.expect_writes()
    return tree_map(lambda leaf: given.get(id(leaf), leaf), result)


def _on_replacements(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What was put in by hand stands for itself: a rank's own, or another sharded gradient."""
    given: dict[int, PartTensor] = {}

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, PartTensor) or leaf.replacement is None:
            return leaf
        given[id(leaf.replacement)] = leaf
        return leaf.replacement

    plain_args, plain_kwargs = tree_map(plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    return tree_map(lambda leaf: given.get(id(leaf), leaf), result)


def _needs_no_values(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return bool(name.endswith("_like") or name.startswith("new_"))


def _on_empty(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """New tensors that only look like a gradient are plain ones."""

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, PartTensor):
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

    plain_args, plain_kwargs = tree_map(empty, (args, kwargs))
    return func(*plain_args, **plain_kwargs)

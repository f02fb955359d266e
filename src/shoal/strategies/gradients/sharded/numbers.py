"""Numbers of whole gradients, from what each rank computes of its part.

See [Note: numbers of gradients]. Each function here answers one of torch's operations, or says
`NotImplemented` where it was asked for something else than one number of all elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import MismatchError
from shoal.strategies.gradients.sharded.owners import LARGEST, SMALLEST, SUM, Combination
from shoal.strategies.gradients.sharded.part import PartTensor
from shoal.torch_internals.tensors import foreach_norm, schema_of

aten = torch.ops.aten

Answer = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def _combined(
    gradients: Sequence[PartTensor], numbers: Sequence[Tensor], how: Combination, what: str
) -> Tensor:
    """One number for each gradient, in double precision; one message for all of them."""
    layouts = [gradient.part.layout for gradient in gradients]
    more = f" and {len(layouts) - 1} more" if len(layouts) > 1 else ""
    what = f"{what} of the gradient of {layouts[0].name}{more}"
    row = torch.stack([number.double() for number in numbers])
    return layouts[0].all_owners().combine(row, [layout.name for layout in layouts], how, what)


def _one(gradient: PartTensor, number: Tensor, how: Combination, what: str) -> Tensor:
    return _combined([gradient], [number], how, what)[0]


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(func).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_partial(gradient: Tensor, given: dict[str, Any]) -> bool:
    """Whether only some dimensions are reduced, or the result is not a single number."""
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    covers_all = not dims or len({dim % max(gradient.dim(), 1) for dim in dims}) >= gradient.dim()
    return not covers_all or bool(given.get("keepdim")) or "out" in given


def _sum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given, gradient = _arguments(func, args, kwargs), args[0]
    if _is_partial(gradient, given) or gradient.is_complex():
        return NotImplemented
    total = _one(gradient, gradient.part.values().sum(dtype=torch.float64), SUM, "sum")
    is_exact = gradient.is_floating_point()
    return total.to(given.get("dtype") or (gradient.dtype if is_exact else torch.int64))


def _mean(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given, gradient = _arguments(func, args, kwargs), args[0]
    if _is_partial(gradient, given) or not gradient.is_floating_point():
        return NotImplemented
    values = gradient.part.values()
    count = torch.tensor(values.numel(), device=values.device)
    sums = [values.sum(dtype=torch.float64), count]
    total, numel = _combined([gradient, gradient], sums, SUM, "mean")
    return (total / numel).to(given.get("dtype") or gradient.dtype)


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given, gradient = _arguments(func, args, kwargs), args[0]
    order = given.get("ord", given.get("p", 2))
    order = 2.0 if order is None else float(order)
    if _is_partial(gradient, given) or order < 0:
        return NotImplemented
    (norm,) = _norms([gradient], order, "norm")
    return norm.to(given.get("dtype") or gradient.dtype.to_real())


def _norms(gradients: Sequence[PartTensor], order: float, what: str) -> list[Tensor]:
    values = [gradient.part.values() for gradient in gradients]
    real = [each.abs() if each.is_complex() else each for each in values]
    filled = [each if each.numel() else each.new_zeros(1) for each in real]
    local = foreach_norm(filled, order, dtype=torch.float64)
    if order == math.inf:
        return list(_combined(gradients, local, LARGEST, what))
    if order == 0:
        return list(_combined(gradients, local, SUM, what))
    powers = _combined(gradients, [norm**order for norm in local], SUM, what)
    return list(powers ** (1.0 / order))


def _foreach_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of gradients of several models or none, too: each gets the norm of all that it is."""
    given = _arguments(func, args, kwargs)
    tensors, order = given["self"], float(given.get("ord", 2))
    if order < 0:
        return NotImplemented
    dtype = given.get("dtype")
    _check_averaged(tensors)
    norms: list[Any] = [None] * len(tensors)
    for indices in _by_owners(tensors):
        chosen = [tensors[index] for index in indices]
        if isinstance(chosen[0], PartTensor):
            found = _norms(chosen, order, "norm")
        else:
            found = list(foreach_norm(chosen, order))
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm.to(dtype or tensors[index].dtype.to_real())
    return norms


def _check_averaged(tensors: Sequence[Tensor]) -> None:
    """A plain gradient among others was put in by hand, and is this rank's own."""
    parts = [tensor for tensor in tensors if isinstance(tensor, PartTensor)]
    plain = {id(tensor) for tensor in tensors if not isinstance(tensor, PartTensor)}
    if plain:
        parts[0].part.layout.all_owners().check_none_of(plain)


def _by_owners(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors whose parts the same ranks hold; of plain ones, too."""
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        owners = tensor.part.layout.owners() if isinstance(tensor, PartTensor) else None
        groups.setdefault(id(owners), []).append(index)
    return list(groups.values())


def _extreme(how: Combination, local: Callable[[Tensor], Tensor], what: str) -> Answer:
    def answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given, gradient = _arguments(func, args, kwargs), args[0]
        is_number = func.overloadpacket in (aten.amax, aten.amin) or "dim" not in given
        if not is_number or "other" in given or _is_partial(gradient, given):
            return NotImplemented
        if not gradient.is_floating_point() or not gradient.numel():
            return NotImplemented
        values = gradient.part.values()
        number = local(values) if values.numel() else values.new_tensor(how.nothing)
        return _one(gradient, number, how, what).to(gradient.dtype)

    return answer


def _truth(how: Combination, local: Callable[[Tensor], Tensor], what: str) -> Answer:
    def answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        gradient = args[0]
        if len(args) > 1 or kwargs:
            return NotImplemented
        return _one(gradient, local(gradient.part.values()), how, what).bool()

    return answer


def _count(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient = args[0]
    if _is_partial(gradient, _arguments(func, args, kwargs)):
        return NotImplemented
    count = torch.count_nonzero(gradient.part.values())
    return _one(gradient, count, SUM, "count_nonzero").long()


def _dot(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    left, right = args
    if not _are_alike(left, right) or left.is_complex():
        return NotImplemented
    product = torch.dot(left.part.values().double(), right.part.values().double())
    return _one(left, product, SUM, "dot").to(left.dtype)


def _equal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    left, right = args
    if not _are_alike(left, right):
        return NotImplemented
    is_equal = torch.tensor(torch.equal(left.part.values(), right.part.values()))
    return bool(_one(left, is_equal.to(left.device), SMALLEST, "equal"))


def _are_alike(left: Tensor, right: Tensor) -> bool:
    are_parts = isinstance(left, PartTensor) and isinstance(right, PartTensor)
    return are_parts and left.part.layout.conforms(right.part.layout)  # type: ignore[attr-defined]


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What torch's ``GradScaler`` asks for: all ranks learn whether any gradient is not finite."""
    gradients, found, inverse = args
    values = [each.part.values() if isinstance(each, PartTensor) else each for each in gradients]
    present = [each for each in values if each.numel()]
    if present:
        func(present, found, inverse)
    for indices in _by_owners(gradients):
        first = gradients[indices[0]]
        if isinstance(first, PartTensor):
            _check_scales(first, found, inverse)


def _check_scales(gradient: PartTensor, found: Tensor, inverse: Tensor) -> None:
    what = "unscale_ of gradients, by a GradScaler"
    numbers = torch.stack([found.double(), inverse.double(), -inverse.double()]).flatten()
    owners = gradient.part.layout.all_owners()
    is_found, highest, lowest = owners.largest_anywhere(numbers.to(gradient.device), what)
    if highest != -lowest:
        raise different_scales(1 / float(highest), -1 / float(lowest))
    found.copy_(is_found)


def different_scales(low: float, high: float) -> MismatchError:
    """The error for ranks whose scalers differ."""
    return MismatchError(
        f"the ranks scale their losses differently, between {low:g} and {high:g}: make the scaler "
        "with the same arguments, and load the same state, on every rank"
    )


NUMBERS: dict[Any, Answer] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.norm: _norm,
    aten.linalg_vector_norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten.max: _extreme(LARGEST, torch.max, "max"),
    aten.amax: _extreme(LARGEST, torch.amax, "max"),
    aten.min: _extreme(SMALLEST, torch.min, "min"),
    aten.amin: _extreme(SMALLEST, torch.amin, "min"),
    aten.any: _truth(LARGEST, torch.any, "any"),
    aten.all: _truth(SMALLEST, torch.all, "all"),
    aten.count_nonzero: _count,
    aten.dot: _dot,
    aten.equal: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
}

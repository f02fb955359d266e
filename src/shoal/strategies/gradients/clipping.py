"""The norm of gradients of which each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.strategies.settings import Ownership


@dataclass(frozen=True)
class HeldGradient:
    """Elements of a gradient on this rank that so many ranks hold the same of."""

    elements: Tensor
    copies: int = 1


def held_gradients(
    groups: Sequence[FlatGroup], gradients: Sequence[GroupGradients], ownership: Ownership
) -> list[HeldGradient]:
    """What this rank holds, in as few tensors as there are numbers of copies."""
    held = []
    for group, own in zip(groups, gradients, strict=True):
        buffer = own.memory.held()
        if buffer is None or not buffer.numel():
            continue
        if not ownership.copies:
            held.append(HeldGradient(buffer))
            continue
        is_whole = buffer.numel() == group.layout.num_elements
        low = 0 if is_whole else group.low
        for slot in group.layout.slots:
            start, stop = max(slot.start - low, 0), min(slot.stop - low, buffer.numel())
            if start < stop:
                held.append(HeldGradient(buffer[start:stop], ownership.copies.get(slot.name, 1)))
    return held


def norm_like(groups: Sequence[FlatGroup], device: torch.device) -> Tensor:
    """The widest dtype of all groups, whichever of them a rank holds a part of."""
    real = [group.master_dtype.to_real() for group in groups]
    dtypes = [dtype for dtype in real if dtype.is_floating_point]
    widest = reduce(torch.promote_types, dtypes or [torch.float32])
    return torch.empty(0, dtype=widest, device=groups[0].master.device if groups else device)


def clip_norm(
    held: Sequence[HeldGradient],
    max_norm: float,
    norm_type: float,
    groups: Sequence[Backend],
    like: Tensor,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their norm over all elements is at most ``max_norm``.

    Args:
        held: What this rank holds.
        max_norm: The largest norm that is left as it is.
        norm_type: 2 for the Euclidean norm, infinity for the largest element.
        groups: The ranks that hold other parts, group by group.
        like: Has the dtype and the device that the norm is wanted in.
        error_if_nonfinite: Whether gradients without a finite norm are an error.

    Returns:
        The norm before scaling, the same on every rank.
    """
    norm_type = float(norm_type)  # which is how torch understands "inf"
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or infinity; got {norm_type}")
    if norm_type == math.inf:
        total = _largest(held, groups, like)
    else:
        total = _norm(held, norm_type, groups, like)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients is {total.item()}, so they cannot "
            "be clipped"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in held:
        gradient.elements.mul_(factor.to(gradient.elements.device))
    return total


def _largest(held: Sequence[HeldGradient], groups: Sequence[Backend], like: Tensor) -> Tensor:
    norms = [torch.linalg.vector_norm(gradient.elements, math.inf) for gradient in held]
    total = _stacked(norms, like).amax()
    if not groups:
        return total
    largest = total.double()  # whatever dtypes a rank holds
    for group in groups:
        group.all_reduce(largest, "max")
    return largest.to(like.dtype)


def _norm(
    held: Sequence[HeldGradient], norm_type: float, groups: Sequence[Backend], like: Tensor
) -> Tensor:
    # Each rank that holds a copy counts its part of it.
    norms = [
        torch.linalg.vector_norm(gradient.elements, norm_type)
        / gradient.copies ** (1.0 / norm_type)
        for gradient in held
    ]
    total: Tensor = torch.linalg.vector_norm(_stacked(norms, like), norm_type)
    if not groups:
        return total
    powers = total.double() ** norm_type  # whatever dtypes a rank holds
    for group in groups:
        group.all_reduce(powers)
    root: Tensor = powers ** (1.0 / norm_type)
    return root.to(like.dtype)


def _stacked(norms: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack([norm.to(like) for norm in norms] or [like.new_zeros(())])

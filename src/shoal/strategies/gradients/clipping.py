"""The norm of gradients of which each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm import Backend

if TYPE_CHECKING:
    from shoal.strategies.engine.engine import Engine

HeldGradient = tuple[Tensor, int]
"""Elements of a gradient on this rank, and how many ranks hold the same."""


def clip_norm(
    engine: Engine, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients so that their norm over all elements is at most ``max_norm``.

    Args:
        engine: Whose gradients, which are averaged.
        max_norm: The largest norm that is left as it is.
        norm_type: 2 for the Euclidean norm, infinity for the largest element.
        error_if_nonfinite: Whether gradients without a finite norm are an error.

    Returns:
        The norm before scaling, the same on every rank.
    """
    norm_type = float(norm_type)  # which is how torch understands "inf"
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or infinity; got {norm_type}")
    held = list(_held_gradients(engine))
    groups = [engine.shard_group] if engine.sharding.gradients else []
    total = _norm(held, norm_type, [*groups, *engine.ownership.axes], _like(engine))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients is {total.item()}, so they cannot "
            "be clipped"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for elements, _ in held:
        elements.mul_(factor.to(elements.device))
    return total


def _held_gradients(engine: Engine) -> Iterator[HeldGradient]:
    """What this rank holds, in as few tensors as there are numbers of copies."""
    copies = engine.ownership.copies
    for own in engine.gradients.groups:
        buffer, group = own.memory.held(), own.group
        if buffer is None or not buffer.numel():
            continue
        if not copies:
            yield buffer, 1
            continue
        low = 0 if buffer.numel() == group.layout.num_elements else group.low
        for slot in group.layout.slots:
            start, stop = max(slot.start - low, 0), min(slot.stop - low, buffer.numel())
            if start < stop:
                yield buffer[start:stop], copies.get(slot.name, 1)


def _like(engine: Engine) -> Tensor:
    """The widest dtype of all groups, whichever of them a rank holds a part of."""
    groups = engine.groups
    real = [group.master_dtype.to_real() for group in groups]
    dtypes = [dtype for dtype in real if dtype.is_floating_point]
    widest = reduce(torch.promote_types, dtypes or [torch.float32])
    device = groups[0].master.device if groups else engine.backend.device
    return torch.empty(0, dtype=widest, device=device)


def _norm(
    held: Sequence[HeldGradient], norm_type: float, groups: Sequence[Backend], like: Tensor
) -> Tensor:
    # Each rank that holds a copy counts its part of it; all of it, where the largest counts.
    norms = [
        torch.linalg.vector_norm(elements, norm_type) / copies ** (1.0 / norm_type)
        for elements, copies in held
    ]
    stacked = torch.stack([norm.to(like) for norm in norms] or [like.new_zeros(())])
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    if not groups:
        return total
    total = total.double()  # whatever dtypes a rank holds
    if norm_type == math.inf:
        for group in groups:
            group.all_reduce(total, "max")
        return total.to(like.dtype)
    powers = total**norm_type
    for group in groups:
        group.all_reduce(powers)
    root: Tensor = powers ** (1.0 / norm_type)
    return root.to(like.dtype)

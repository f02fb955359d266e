"""The norm of gradients of which each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm import Backend


def clip_norm(
    buffers: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    shards: Backend,
    *,
    is_sharded: bool,
) -> Tensor:
    """Scales gradients so that their norm over all elements is at most ``max_norm``.

    Args:
        buffers: What this rank holds.
        max_norm: The largest norm that is left as it is.
        norm_type: 2 for the Euclidean norm, infinity for the largest element.
        shards: The ranks that the model is divided among.
        is_sharded: Whether each of them holds a part only.

    Returns:
        The norm before scaling, the same on every rank.
    """
    norms = [torch.linalg.vector_norm(buffer, norm_type) for buffer in buffers]
    norms = norms or [torch.zeros((), device=shards.device)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if is_sharded:
        total = _over_ranks(total, norm_type, shards)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for buffer in buffers:
        buffer.mul_(factor)
    return total


def _over_ranks(norm: Tensor, norm_type: float, shards: Backend) -> Tensor:
    if norm_type == math.inf:
        largest: Tensor = shards.all_reduce(norm.clone(), "max")
        return largest
    total: Tensor = shards.all_reduce(norm**norm_type) ** (1.0 / norm_type)
    return total

"""Running statistics and the like: every rank goes on with rank 0's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.comm import Backend


def share_buffers(module: nn.Module, backend: Backend) -> None:
    """Gives all ranks rank 0's buffers, with one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        joined = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        backend.broadcast(joined)
        parts = joined.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            _take_over(buffer, part.view(buffer.shape))


@torch.no_grad()
def _take_over(buffer: Tensor, values: Tensor) -> None:
    # What is equal is left alone: a graph of an earlier forward may still need it unchanged.
    if not torch.equal(buffer, values):
        buffer.copy_(values)

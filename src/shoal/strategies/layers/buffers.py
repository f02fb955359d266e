"""Running statistics and the like: every rank goes on with rank 0's, or with the average.

[Note: buffers that learn]
A buffer that forward changes by what it sees (BatchNorm's statistics, a codebook that follows the
data) is another one on every rank after every pass. Before the next pass of training all ranks
take rank 0's. Where the average is asked for they also take it when gradients have been averaged,
so that a rank that looks at its own buffers after a step sees the average of all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.torch_support.memory import are_equal


def share_buffers(buffers: Iterable[Tensor], backend: Backend, *, averages: bool = False) -> None:
    """Gives all ranks the same buffers, with one message for each dtype and device.

    ``averages``: floating numbers become the average over the ranks, with a second message.
    """
    if backend.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for alike in kinds.values():
        own = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
        joined = own.clone() if averages else own
        backend.broadcast(joined)
        if averages and (own.is_floating_point() or own.is_complex()):
            joined = _average(own, joined, backend)
        parts = joined.split([buffer.numel() for buffer in alike])
        for buffer, part in zip(alike, parts, strict=True):
            values = part.view(buffer.shape)
            # What is equal is left alone: a graph of an earlier forward may need it unchanged.
            if not are_equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)


def _average(own: Tensor, first: Tensor, backend: Backend) -> Tensor:
    """Rank 0's plus the mean of what others differ by: what is equal stays so to the last bit."""
    wide = torch.complex128 if own.is_complex() else torch.float64
    # What is equal may be infinite, as in masks, and then has no difference.
    apart = torch.where(own == first, 0, own.to(wide) - first.to(wide))
    backend.all_reduce(apart)
    return (first.to(wide) + apart / backend.size).to(own.dtype)

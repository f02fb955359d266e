"""The average of an optimizer's state over ranks of which each has a state of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.sharding.extent import Extent
from shoal.sharding.holding import HeldState


def whole_states(held: Iterable[HeldState]) -> list[HeldState]:
    """One entry for each parameter, joined from pieces of it."""
    pieces: dict[str, list[HeldState]] = {}
    for each in held:
        pieces.setdefault(each.name, []).append(each)
    return [_joined(name, parts) for name, parts in pieces.items()]


def _joined(name: str, parts: list[HeldState]) -> HeldState:
    parts.sort(key=lambda part: part.extent.start)
    tensors = {
        key: torch.cat([part.tensors[key].reshape(-1) for part in parts])
        for key in parts[0].tensors
    }
    return HeldState(name, Extent.whole(parts[0].extent.shape), tensors, parts[0].shared)


@torch.no_grad()
def averaged_states(own: Sequence[HeldState], backend: Backend) -> list[HeldState]:
    """The mean over those ranks that have state of a parameter; every rank calls it.

    What is not one number for each element (the number of steps), or no floating number, is that
    of the first rank that has it.
    """
    if backend.size == 1:
        return list(own)
    told = [[each.name, list(each.extent.shape), _dtypes(each), dict(each.shared)] for each in own]
    everywhere = backend.all_gather_object(told)
    holders: dict[str, list[int]] = {}
    about: dict[str, Any] = {}
    for rank, entries in enumerate(everywhere):
        for name, *entry in entries:
            holders.setdefault(name, []).append(rank)
            about.setdefault(name, entry)
    by_name = {each.name: each for each in own}
    averaged = []
    for name, (shape, dtypes, shared) in about.items():
        tensors = {
            key: _average(by_name.get(name), key, dtype, torch.Size(shape), holders[name], backend)
            for key, dtype in dtypes.items()
        }
        averaged.append(HeldState(name, Extent.whole(torch.Size(shape)), tensors, shared))
    return averaged


def _dtypes(held: HeldState) -> dict[str, str]:
    return {key: str(value.dtype).removeprefix("torch.") for key, value in held.tensors.items()}


def _average(
    own: HeldState | None,
    key: str,
    dtype: str,
    shape: torch.Size,
    holders: Sequence[int],
    backend: Backend,
) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    is_averaged = kind.is_floating_point or kind.is_complex
    counts = own is not None and (is_averaged or backend.rank == holders[0])
    value = own.tensors[key].clone() if own is not None and counts else None
    if value is None:
        value = torch.zeros(shape.numel(), dtype=kind, device=backend.device)
    total: Tensor = backend.all_reduce(value)
    return total.div_(len(holders)) if is_averaged else total

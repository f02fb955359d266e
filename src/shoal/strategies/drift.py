"""Finds replicas that have drifted apart, whatever the reason, and names the first parameter.

Parameters that every rank holds, and gradients that were averaged, are the same on every rank to
the bit, unless somebody edits them on one rank, or steps them there. Now and then the ranks compare
a fingerprint of each: one pass over the memory, and one small collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.agreement import by_rank
from shoal.comm.operation import AllGather
from shoal.errors import MismatchError
from shoal.strategies.flat_group import FlatGroup, Residence
from shoal.strategies.gradients import GroupGradients

CHECK_EVERY = 100
"""How many steps pass between two comparisons by default."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def is_due(number: int, every: int) -> bool:
    """Whether step ``number``, from 1, is one of those before which the ranks compare.

    Most mistakes are made from the beginning, so the first steps are looked at more often.
    """
    if every < 1:
        return False
    is_early = number < every and number & (number - 1) == 0
    return is_early or number % every == 0


def replicated_parameters(groups: Sequence[FlatGroup]) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds whole of the parameters, by name."""
    for group in groups:
        if group.residence is Residence.REPLICATED:
            for slot in group.layout.slots:
                yield slot.name, group.whole[slot.start : slot.stop]


def replicated_gradients(
    gradients: Sequence[GroupGradients],
) -> Iterator[tuple[str, Tensor | None]]:
    """Averaged gradients that this rank holds whole, by their parameters' names; None for none."""
    for own in gradients:
        whole = None if own.is_sharded else own.held()
        if whole is not None:
            for place, slot in enumerate(own.group.layout.slots):
                yield slot.name, whole[slot.start : slot.stop] if place in own.used else None


def compare(
    group: Backend,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    doing: str,
) -> None:
    """Compares fingerprints; all ranks of the group call it with the same names.

    Args:
        group: The ranks.
        parameters: What each of them holds, by name.
        gradients: The same; None where no rank has one.
        doing: What the ranks are at, in words.

    Raises:
        MismatchError: Naming the first that is not the same on every rank.
    """
    # Ranks that hold parts of other sizes may have them in another order.
    held: list[tuple[str, Tensor | None]] = sorted(parameters.items(), key=itemgetter(0))
    held += [(f"the gradient of {name}", gradients[name]) for name in sorted(gradients)]
    if not held or group.size == 1:
        return
    own = torch.stack([fingerprint(tensor).to(group.device) for _, tensor in held])
    operation = AllGather(own.unsqueeze(0), None)
    operation.signature = f"comparison of {len(held)} replicas in {doing}"
    rows = group.run(operation).tolist()
    for (name, _), values in zip(held, zip(*rows, strict=True), strict=True):
        if len(set(values)) > 1:
            versions = list(dict.fromkeys(values))
            shown = by_rank([f"value {versions.index(v) + 1}" for v in values], group.ranks)
            raise MismatchError(
                f"the ranks have drifted apart: {name} is not the same on all of them ({shown}). "
                "Something changed it on some ranks only: an edit of weights or gradients that "
                "depends on the rank or on its own batch, or a step made by something else than "
                "the wrapped optimizer. Do the same on every rank, or load a checkpoint."
            )


def fingerprint(tensor: Tensor | None) -> Tensor:
    """One number of the bits of a tensor, on its device."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64)
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits).flatten()
    bits = bits.view(_INTEGERS[bits.itemsize])
    # Two changes that cancel out in the sum do not in the other, and a last bit counts in both.
    return bits.sum(dtype=torch.int64) * 31 + (bits ^ (bits >> 3)).sum(dtype=torch.int64)

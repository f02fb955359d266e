"""Finds replicas that have drifted apart, whatever the reason, and names the first parameter.

Parameters that every rank holds, and gradients that were averaged, are the same on every rank to
the bit, unless a user edits or steps them on one rank only. Now and then the ranks compare
a fingerprint of each: one pass over the memory, and one small collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.agreement import by_rank
from shoal.comm.operation import AllGather
from shoal.errors import MismatchError
from shoal.strategies.consistency.rounds import Vote
from shoal.strategies.engine.flat_group import FlatGroup, Residence
from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.torch_support.fingerprint import checksum

if TYPE_CHECKING:
    from shoal.strategies.engine.engine import Engine

CHECK_EVERY = 100
"""How many steps pass between two comparisons by default."""

GRADIENT_OF = "the gradient of "


def is_due(number: int, every: int) -> bool:
    """Whether step ``number``, from 1, is one of those before which the ranks compare.

    Most mistakes are made from the beginning, so the first steps are looked at more often.
    """
    if every < 1:
        return False
    is_early = number < every and number & (number - 1) == 0
    return is_early or number % every == 0


HeldWholes = Mapping[str, Tensor | None]
"""What a rank holds whole, by name; None where no rank has it."""


def replicated_buffers(
    groups: Sequence[FlatGroup], gradients: Sequence[GroupGradients]
) -> dict[str, Tensor | None]:
    """All that this rank holds whole, in as few tensors as there are groups."""
    held: dict[str, Tensor | None] = {
        f"group {group.index}": group.whole
        for group in groups
        if group.residence is Residence.REPLICATED
    }
    for own in gradients:
        if not own.is_sharded and own.used:
            held[f"gradients of group {own.group.index}"] = own.memory.held()
    return held


def replicated_tensors(
    groups: Sequence[FlatGroup], gradients: Sequence[GroupGradients]
) -> dict[str, Tensor | None]:
    """The same, parameter by parameter."""
    parameters: dict[str, Tensor | None] = {
        slot.name: group.whole[slot.start : slot.stop]
        for group in groups
        if group.residence is Residence.REPLICATED
        for slot in group.layout.slots
    }
    averaged: dict[str, Tensor | None] = {}
    for own in gradients:
        whole = None if own.is_sharded else own.memory.held()
        if whole is not None:
            for index, slot in enumerate(own.group.layout.slots):
                part = whole[slot.start : slot.stop] if index in own.used else None
                averaged[GRADIENT_OF + slot.name] = part
    # Ranks that hold parts of other sizes may have them in another order.
    return dict(sorted(parameters.items())) | dict(sorted(averaged.items()))


def differing(group: Backend, held: HeldWholes, doing: str) -> dict[str, Sequence[int]]:
    """What is not the same on all ranks: its fingerprint on each; all call it with the same names.

    ``doing`` is what the ranks are at, in words.
    """
    if not held or group.size == 1:
        return {}
    own = torch.stack([checksum(tensor).to(group.device) for tensor in held.values()])
    operation = AllGather(own.unsqueeze(0), None)
    operation.signature = f"comparison of {len(held)} replicas in {doing}"
    columns = zip(*group.run(operation).tolist(), strict=True)
    return {name: found for name, found in zip(held, columns, strict=True) if len(set(found)) > 1}


def check(group: Backend, held: HeldWholes, doing: str) -> None:
    """Raises `MismatchError` naming the first that is not the same on all ranks."""
    for name, found in differing(group, held, doing).items():
        values = list(dict.fromkeys(found))
        shown = by_rank([f"value {values.index(each) + 1}" for each in found], group.ranks)
        raise MismatchError(
            f"the ranks have drifted apart: {name} is not the same on all of them ({shown}). "
            "Something changed it on some ranks only: an edit of weights or gradients that "
            "depends on the rank or on its own batch, or a step made by something else than "
            "the wrapped optimizer. Do the same on every rank, or load a checkpoint."
        )


class ReplicaCheck:
    """The comparisons of one model's replicas; see [Note: ranks that train alike]."""

    def __init__(self, engine: Engine, backend: Backend) -> None:
        """Compares over ``backend``."""
        self._engine, self._backend = engine, backend
        self._every = engine.settings.check_every

    def check_step(self, number: int) -> None:
        """Before an optimizer's step ``number``: raises unless the ranks have done the same."""
        for axis in self._engine.ownership.axes:
            Vote.cast(axis, self._engine.progress, "the beginning of optimizer.step()")
        if is_due(number, self._every):
            self._compare(self._engine.gradients.groups, "optimizer.step()")

    def check(self, doing: str) -> None:
        """Compares the parameters that every rank holds; ``doing`` is said in the error."""
        if self._every:
            self._compare([], doing)

    def _compare(self, gradients: Sequence[GroupGradients], doing: str) -> None:
        groups, ownership = self._engine.groups, self._engine.ownership
        if differing(self._backend, replicated_buffers(groups, gradients), doing):
            check(self._backend, replicated_tensors(groups, gradients), doing)
        copies = ownership.copies
        if copies:  # the last axis is that of layers which are split
            held = replicated_tensors(groups, gradients)
            copied = [n for n in held if copies.get(n.removeprefix(GRADIENT_OF), 1) > 1]
            check(ownership.axes[-1], {name: held[name] for name in copied}, doing)

"""All gradients of a model, as users and optimizers ask for them, and those put in by hand.

[Note: by hand]
A plain tensor that was put in the place of a gradient is this rank's own, as one from backward is,
and is averaged with the others' when it is used: at the next backward, or at the optimizer's step.
Nothing happens at the moment it is put in. So a rank that finds some asks the others, and a rank
that has seen no averaged gradients since its last step asks, too: the others may have some where it
has none. In a plain loop no rank asks.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm.operation import Barrier
from shoal.comm.operation.base import Header
from shoal.errors import MismatchError, ShoalError
from shoal.strategies.gradients.clipping import clip_norm
from shoal.strategies.gradients.compressed.exchange import CompressedExchange, ExchangeQueue
from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.strategies.gradients.memory import BufferPool
from shoal.strategies.gradients.reductions import Flagged, Flags
from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.strategies.gradients.shown import ShownGradients
from shoal.torch_internals.tensors import as_plain_tensors, versions_of

if TYPE_CHECKING:
    from shoal.strategies.engine.engine import Engine
    from shoal.strategies.engine.flat_group import FlatGroup


class ModelGradients:
    """The gradients of one model on one rank: a `GroupGradients` for each group."""

    def __init__(self, engine: Engine, reduce_group: Backend, meeting: Backend) -> None:
        """``meeting``: the same ranks, where they meet for gradients outside of backward."""
        self._engine, self._meeting = engine, meeting
        settings, shard_group = engine.settings, engine.shard_group
        is_sharded = engine.sharding.gradients and shard_group.size > 1
        self.pool = BufferPool(shard_group, engine.account)
        self.owners = GradientOwners(engine, meeting if is_sharded else None)
        self.exchanges: ExchangeQueue | None = None
        """Where gradients travel compressed."""
        if settings.compression is not None and shard_group.size > 1:
            self.exchanges = ExchangeQueue(shard_group.lane(self))
        self.groups = [
            GroupGradients(
                group,
                self.pool,
                reduce_group,
                self.owners,
                is_sharded,
                settings.hides_gradients,
                self._exchange(group, reduce_group, is_sharded=is_sharded),
            )
            for group in engine.groups
        ]
        self._parameters = [each for group in engine.groups for each in group.parameters]
        self._names = [name for group in engine.groups for name in group.names]
        self._group_of = [group.index for group in engine.groups for _ in group.parameters]
        self._versions: list[int] = []
        self.hand_made = HandMade(self.groups, meeting, engine.ranks.replica_group)
        self.num_averaged = 0
        """How often there were averaged gradients after a reduction, on any rank and so on all."""
        self._num_averaged_stepped = 0

    def _exchange(
        self, group: FlatGroup, backend: Backend, *, is_sharded: bool
    ) -> CompressedExchange | None:
        compression = self._engine.settings.compression
        if self.exchanges is None or compression is None:
            return None
        account = self._engine.account
        return CompressedExchange(
            group, compression, backend, self.exchanges, account, is_sharded=is_sharded
        )

    def __iter__(self) -> Iterator[GroupGradients]:
        """Group by group."""
        return iter(self.groups)

    # Backward -----------------------------------------------------------------------------

    def expect(self, *, one_by_one: bool) -> None:
        """A backward pass begins; ``one_by_one``: see `GroupGradients.expect`."""
        for gradients in self.groups:
            gradients.expect(one_by_one=one_by_one)
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        """How often each parameter was changed in place."""
        with as_plain_tensors():
            versions = versions_of(self._parameters)
        if not self._engine.gathering.is_needed:
            return versions
        freed = [gradients.group.num_freed for gradients in self.groups]
        return list(map(operator.sub, versions, [freed[index] for index in self._group_of]))

    def check_unchanged(self) -> None:
        """Raises if parameters were changed in place since the backward began."""
        versions = self._read_versions()
        if versions != self._versions:
            changed = map(operator.ne, versions, self._versions)
            name = next(itertools.compress(self._names, changed))
            raise ShoalError(
                f"{name} was changed while backward ran, by an optimizer that steps in a hook, "
                "say. Gradients are averaged over the ranks by the end of backward, so each rank "
                "would step with its own, and the ranks would drift apart: step after backward, "
                "with the optimizer that shoal.as_distributed(model, optimizer) returned"
            )

    # Around reductions --------------------------------------------------------------------

    def add_to(self) -> None:
        """Before more is added: what users did so far counts."""
        self._settle()
        self.hand_made.add_to()

    def _settle(self) -> None:
        if self.owners.kept:
            self.owners.settle()
        for gradients in self.groups:
            gradients.shown.note_writes()

    def _expect_writes(self) -> None:
        for gradients in self.groups:
            gradients.shown.expect_writes()

    @property
    def are_there(self) -> bool:
        """Whether a backward has left some on this rank that nobody has forgotten."""
        return any(gradients.used or gradients.collected for gradients in self.groups)

    def note_averaged(self) -> None:
        """Gradients were averaged, if there were any."""
        self.num_averaged += any(gradients.used for gradients in self.groups)

    def note_stepped(self) -> None:
        """An optimizer has used what there is."""
        if self.exchanges is not None and self.num_averaged > self._num_averaged_stepped:
            self.exchanges.num_steps += 1
        self._num_averaged_stepped = self.num_averaged

    def show(self) -> None:
        """Lets the parameters show what they have."""
        for gradients in self.groups:
            gradients.shown.show()
        if self.owners.kept:
            self.owners.refresh()
        self._expect_writes()

    def adopt(self, num_averaged: int | None = None) -> None:
        """What users did to gradients counts, and what they put in by hand is averaged.

        Args:
            num_averaged: What `num_averaged` was when this was last asked for; by default at the
                last step. Where nothing was averaged since, all ranks meet; see [Note: by hand].
        """
        self._settle()
        seen = self._num_averaged_stepped if num_averaged is None else num_averaged
        self.hand_made.average(is_due=self.num_averaged == seen)
        self._expect_writes()

    def gather(self, num_averaged: int) -> None:
        """Every rank gets the whole averaged gradient, for optimizers that need all of it.

        ``num_averaged``: see `adopt`.
        """
        self.adopt(num_averaged)
        for gradients in self.groups:
            gradients.gather(self._engine.gather_group)

    def check_averaged(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises if this rank's gradients of some parameters are still only its own."""
        if any(gradients.local for gradients in self.groups):
            for parameter in parameters:
                group, index = self._engine.index_of[id(parameter)]
                self.groups[group].check_averaged(index)

    # What users ask for -------------------------------------------------------------------

    def buffers(self) -> list[Tensor]:
        """All averaged gradients that this rank holds."""
        self.adopt()
        held = [gradients.memory.held() for gradients in self.groups]
        return [buffer for buffer in held if buffer is not None and buffer.numel()]

    def shard(self, name: str) -> Tensor | None:
        """This rank's part of a parameter's averaged gradient."""
        parameter = dict(self._engine.module.named_parameters()).get(name)
        if parameter is None:
            raise KeyError(f"the model has no parameter named {name!r}")
        group, index = self._engine.index_of[id(parameter)]
        gradients, layout = self.groups[group], self._engine.groups[group].layout
        self._settle()
        self.hand_made.adopt()
        if index in gradients.shown.by_hand:
            raise ShoalError(
                f"the gradient of {name} was put in by hand and is this rank's own: call "
                "model.synchronize_gradients() first, which averages it over the ranks"
            )
        own = gradients.memory.own()
        if own is None or index not in gradients.used:
            return None
        for piece in layout.pieces(self._engine.shard_group.rank):
            if piece.name == layout.slots[index].name:
                return own[piece.offset : piece.offset + piece.stop - piece.start]
        return own[:0]

    def clip_norm(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the gradients so that their norm over all elements is at most ``max_norm``."""
        self.adopt()
        norm = clip_norm(self._engine, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        self.owners.refresh()
        return norm

    def clip_value(self, limit: float) -> None:
        """Clamps every element of the gradients."""
        for buffer in self.buffers():
            buffer.clamp_(-limit, limit)
        self.owners.refresh()

    def clear(self) -> None:
        """Forgets all gradients."""
        for gradients in self.groups:
            gradients.clear()

    def zero(self, parameters: Collection[nn.Parameter], *, set_to_none: bool) -> None:
        """Forgets the gradients of some parameters, or makes them zero."""
        chosen: dict[int, set[int]] = {}
        for parameter in parameters:
            group, index = self._engine.index_of[id(parameter)]
            chosen.setdefault(group, set()).add(index)
        for group, indices in chosen.items():
            gradients = self.groups[group]
            if not set_to_none:
                gradients.shown.adopt()
                gradients.shown.make_zero(indices)
            elif len(indices) == len(gradients.group.parameters):
                gradients.clear()
            else:
                gradients.shown.forget(indices)


class HandMade:
    """The gradients of one model that were put in by hand."""

    def __init__(
        self, gradients: Sequence[GroupGradients], group: Backend, replicas: Backend | None
    ) -> None:
        """``group``: the ranks that share the gradients; ``replicas``: those with the same part."""
        self._gradients, self._replicas = gradients, replicas
        groups = [group] if replicas is None else [group, replicas]
        self._groups = [each for each in groups if each.size > 1]
        self._are_final = False

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """What is put in inside of it, or there at a step inside, is the same on every rank."""
        self.adopt()
        before = {id(g) for each in self._gradients for g in each.shown.by_hand.values()}
        was_final, self._are_final = self._are_final, True
        try:
            yield
        finally:
            self._are_final = was_final
        for shown in self._find():
            shown.take_as_final([i for i, g in shown.by_hand.items() if id(g) not in before])

    def adopt(self) -> None:
        """Finds what users did to gradients; what needs no averaging is taken over."""
        for shown in self._find():
            if shown.by_hand and (self._are_final or not self._groups):
                shown.take_as_final([*shown.by_hand])

    def _find(self) -> list[ShownGradients]:
        """Finds what was put in; views of gradients that are overwritten now become copies."""
        everything = [each.shown for each in self._gradients]
        for shown in everything:
            shown.adopt()
        for shown in everything:
            for index, gradient in shown.by_hand.items():
                if any(each.lies_here(gradient) for each in everything):
                    shown.replace_by_hand(index, gradient.clone())
        return everything

    def add_to(self) -> None:
        """Backward adds to what was put in, and averages it."""
        self.adopt()
        for gradients in self._gradients:
            if gradients.shown.by_hand:
                gradients.shown.take_as_local()

    def average(self, *, is_due: bool) -> None:
        """Averages them over the ranks, if any has some; see [Note: by hand].

        ``is_due``: whether other ranks may have some though this one has none.
        """
        self.adopt()
        own = {number for number, each in enumerate(self._gradients) if each.shown.by_hand}
        if not self._groups or not (own or is_due):
            return
        for group in self._groups:
            question = _Question(own, len(self._gradients))
            group.run(question)
            own = question.flags.union
        for number in sorted(own):
            self._average_group(self._gradients[number])

    def _average_group(self, gradients: GroupGradients) -> None:
        by_hand = set(gradients.shown.by_hand)
        averaged = gradients.used - by_hand
        for group in self._groups:
            comparison = _HandMadeComparison(by_hand, averaged, gradients.group.names)
            group.run(comparison)
            by_hand, averaged = comparison.by_hand, comparison.averaged
        gradients.shown.take_as_local()
        gradients.start_reduction()
        gradients.finish_reduction()
        if self._replicas is not None:
            gradients.average_over(self._replicas)
        gradients.shown.show()


class _Question(Flagged, Barrier):
    """Which groups have gradients that any rank put in by hand."""

    signature = "use of gradients that may have been put in by hand"

    def __init__(self, own: set[int], count: int) -> None:
        self.carry(Flags(own, count))


class _HandMadeComparison(Flagged, Barrier):
    """What each rank has of a group: put in by hand, or averaged already."""

    def __init__(
        self, by_hand: Collection[int], averaged: Collection[int], names: Sequence[str]
    ) -> None:
        self._names, self._count = names, len(names)
        self.signature = f"average of gradients put in by hand, {names[0]} and others"
        both = {*by_hand, *(self._count + index for index in averaged)}
        self.carry(Flags(both, 2 * self._count))

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Raises if one rank's own would be averaged with what is an average already."""
        found = []
        for header in headers:
            flags = Flags(set(), 2 * self._count)
            flags.unite([header])
            found.append(flags.union)
        for index, name in enumerate(self._names):
            own = [rank for rank, each in zip(ranks, found, strict=True) if index in each]
            others = [
                rank for rank, each in zip(ranks, found, strict=True) if index + self._count in each
            ]
            if own and others:
                raise MismatchError(
                    f"the gradient of {name} was put in by hand on ranks {own}, but is the average "
                    f"of a backward on ranks {others}: put it in on every rank, or change the "
                    "averaged one in index"
                )

    @property
    def by_hand(self) -> set[int]:
        """Indices of parameters whose gradient some rank has put in."""
        return {index for index in self.flags.union if index < self._count}

    @property
    def averaged(self) -> set[int]:
        """Indices of parameters whose gradient some rank shows as averaged."""
        return {index - self._count for index in self.flags.union if index >= self._count}

"""The engine of all data-parallel strategies: three switches decide what is sharded.

It is put together here. What it does is in its attributes: `passes` (forward and backward),
`gathering` (parameters on demand), `parameters` (between passes) and `steps` (new values for all
ranks, in parameters.py), `gradients` (collected, averaged, shown: gradients/model_gradients.py) and
`replicas` (comparisons of what all ranks hold: consistency/drift.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NoReturn

from torch import Tensor, nn

from shoal.compression import Quantize
from shoal.sharding.analyzer import ParameterAnalyzer, ParameterGroup
from shoal.sharding.layout import GroupLayout, balanced_owners
from shoal.strategies.consistency.drift import ReplicaCheck
from shoal.strategies.consistency.input_watch import InputWatch
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.engine.admission import check_models, check_trains_alike, refuse_copy
from shoal.strategies.engine.flat_group import FlatGroup, GroupStorage, Residence
from shoal.strategies.engine.gathering import Gathering
from shoal.strategies.engine.parameters import Parameters, Steps
from shoal.strategies.engine.passes import Passes
from shoal.strategies.gradients.model_gradients import ModelGradients
from shoal.strategies.layers.buffers import share_buffers
from shoal.strategies.layers.precision import Precision
from shoal.strategies.settings import Ownership, Ranks, Settings, Sharding
from shoal.system.libc import keep_freed_memory


class Engine:
    """Parameters, gradients and how they travel between the ranks, for one model on one rank."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        sharding: Sharding,
        settings: Settings,
        undivided: Collection[nn.Parameter] = (),
    ) -> None:
        """Takes the module's parameters over; rank 0's values count.

        Where parameters are in the CPU's memory, the C library keeps what this process frees.
        ``undivided`` are parameters that must not be cut: their optimizer looks at all of one.
        """
        self.module, self.sharding, self.settings = module, sharding, settings
        self.ranks, self.backend, self.shard_group = ranks, ranks.all, ranks.shard_group
        self.ownership = Ownership()
        """Who holds the rest of the model, where these ranks have a part of it only."""
        self._hooks: list[Any] = []
        try:
            self._take_over(module, undivided)
        except BaseException:  # a rank was lost, perhaps: another engine may follow
            self._remove_hooks()
            raise

    def _take_over(self, module: nn.Module, undivided: Collection[nn.Parameter]) -> None:
        settings = self.settings
        check_models(module, self.backend)
        check_trains_alike(module, self.backend)
        if any(parameter.is_cpu for parameter in module.parameters()):
            keep_freed_memory()
        self.gather_group, reduce_group = self.shard_group.lane(self), self.shard_group.lane(self)
        buffer_group = self.backend.lane(self)
        self.progress = Progress()
        self.backend.compare_at_exit(self.progress)
        self.input_watch = InputWatch(buffer_group, self.progress)
        self.precision = Precision(module, settings.compute_dtype)
        self._hooks += self.precision.install(module)
        self.account = self.backend.open_account()
        weakref.finalize(self, self.account.close).atexit = False
        self.account.add("buffers", sum(buffer.nbytes for buffer in module.buffers()))
        self.groups = Grouping(self, undivided).make()
        self.index_of = {
            id(parameter): (group.index, index)
            for group in self.groups
            for index, parameter in enumerate(group.parameters)
        }
        """By a parameter's identity: the index of its group, and its own there."""
        self.gathering = Gathering(
            self.groups, self.gather_group, self.progress, settings.prefetch_bytes
        )
        # A rank that skips a meeting is found at its next operation: a gather, or a reduction.
        meeting = self.gather_group if self.gathering.is_needed else reduce_group
        self.gradients = ModelGradients(self, reduce_group, meeting)
        self.steps = Steps(self.groups, reduce_group, self.progress)
        self.passes = Passes(self, reduce_group, buffer_group)
        self.parameters = Parameters(self)
        self.replicas = ReplicaCheck(self, reduce_group)
        self._hooks = self.passes.install() + self._hooks
        share_buffers(module.buffers(), buffer_group)
        self.gathering.free_all()

    def dissolve(self) -> None:
        """Gives the parameters memory of their own again, and takes its hooks off the module."""
        values: dict[nn.Parameter, Tensor] = {}
        with self.parameters.full(keep_changes=False):
            for group in self.groups:
                group.to_replicated()
                values |= {parameter: parameter.data.clone() for parameter in group.parameters}
        for parameter, value in values.items():
            parameter.data = value
        self._remove_hooks()
        self.account.close()

    def abandon(self) -> None:
        """Lets go of the module without a word to the other ranks, who may be gone.

        The parameters have memory of their own then, and no values: these come from elsewhere.
        """
        for group in self.groups:
            group.abandon()
        self._remove_hooks()
        self.account.close()

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()

    def __reduce__(self) -> NoReturn:
        """Refused."""
        refuse_copy()


class Grouping:
    """Decides where each parameter of a model lives, and makes the groups' memory."""

    def __init__(self, engine: Engine, undivided: Collection[nn.Parameter]) -> None:
        """``undivided``: parameters that must not be cut."""
        self._engine, self._shard_group = engine, engine.shard_group
        self._undivided = {id(parameter) for parameter in undivided}

    def make(self) -> list[FlatGroup]:
        """Takes the parameters over, with the first rank's values."""
        engine, shards, groups = self._engine, self._shard_group, []
        load = [0] * shards.size
        apart = {id(p): self._kind(name, p) for name, p in engine.module.named_parameters()}
        analyzer = ParameterAnalyzer(engine.module, engine.settings.min_group_bytes, apart)
        for index, found in enumerate(analyzer.groups):
            for parameter in found.parameters:
                engine.backend.broadcast(parameter.data)
            layout = self._lay_out(found, load)
            by_name = dict(zip(found.names, found.parameters, strict=True))
            parameters = [by_name[slot.name] for slot in layout.slots]
            storage = self._storage(parameters[0])
            groups.append(FlatGroup(index, layout, parameters, shards, storage, engine.account))
        return groups

    def _kind(self, name: str, parameter: nn.Parameter) -> str:
        """Parameters of different kinds share no group.

        What a codec makes of a gradient depends on those beside it, and on where the group is cut.
        """
        settings = self._engine.settings
        is_copied = settings.compression is not None and name in settings.copied
        return f"{self._storage(parameter)}{', copied' if is_copied else ''}"

    def _storage(self, parameter: nn.Parameter) -> GroupStorage:
        dtype = self._engine.precision.dtype_of(parameter)
        engine, residence = self._engine, self._residence(parameter)
        is_part = engine.settings.hides_gradients
        codec = self._codec(parameter)
        return GroupStorage(residence, engine.sharding.optimizer, dtype, is_part, codec)

    def _codec(self, parameter: nn.Parameter) -> Quantize | None:
        """Vectors are short and matter much, so they are gathered as they are."""
        is_matrix = parameter.dim() > 1 and parameter.is_floating_point()
        is_gathered = self._engine.sharding.optimizer and self._shard_group.size > 1
        return self._engine.settings.gather_codec if is_matrix and is_gathered else None

    def _residence(self, parameter: nn.Parameter) -> Residence:
        """Sharded parameters are gathered, unless the ranks of one host share their memory."""
        is_small = parameter.numel() < self._engine.settings.resident_below
        if not self._engine.sharding.parameters or self._shard_group.size == 1 or is_small:
            return Residence.REPLICATED
        is_common = self._shard_group.shares_memory and parameter.is_cpu
        return Residence.COMMON if is_common else Residence.SHARDED

    def _lay_out(self, group: ParameterGroup, load: list[int]) -> GroupLayout:
        """Slices of one size, or whole parameters if some of the group's must stay whole."""
        num_ranks = self._shard_group.size
        shapes = [(n, p.shape) for n, p in zip(group.names, group.parameters, strict=True)]
        codec = self._codec(group.parameters[0])
        block = 1 if codec is None else codec.block
        if self._undivided.isdisjoint(map(id, group.parameters)):
            return GroupLayout.even(shapes, num_ranks, group.dtype.itemsize, block)
        owners = balanced_owners([shape.numel() for _, shape in shapes], num_ranks, load)
        return GroupLayout.whole(shapes, owners, num_ranks, block)

"""The engine of all data-parallel strategies: three switches decide what is sharded.

It is put together here. What it does is in its parts: `passes` (forward and backward), `gathering`
(parameters on demand), `parameters` (between passes), `steps` (new values for all ranks),
`gradients` (collected, averaged, shown), `replicas` (comparisons of what all ranks hold).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import NoReturn

from torch import Tensor, nn

from shoal.strategies.consistency.drift import ReplicaCheck
from shoal.strategies.consistency.input_watch import InputWatch
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.engine.gathering import Gathering
from shoal.strategies.engine.grouping import Grouping
from shoal.strategies.engine.parameters import Parameters
from shoal.strategies.engine.passes import Passes
from shoal.strategies.engine.steps import Steps
from shoal.strategies.gradients.model_gradients import ModelGradients
from shoal.strategies.guards.admission import check_models, check_trains_alike, refuse_copy
from shoal.strategies.layers.buffers import share_buffers
from shoal.strategies.layers.precision import Precision
from shoal.strategies.ranks import Ownership, Ranks
from shoal.strategies.settings import Settings, Sharding
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

        Args:
            module: The user's module.
            ranks: Those that train it together.
            sharding: What is sharded.
            settings: What users may choose.
            undivided: Parameters that must not be cut: their optimizer looks at all of one.
        """
        self.module, self.sharding, self.settings = module, sharding, settings
        self.ranks, self.backend, self.shard_group = ranks, ranks.all, ranks.shard_group
        self.ownership = Ownership()
        """Who holds the rest of the model, where these ranks have a part of it only."""
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
        self._hooks = self.precision.install(module)
        self.account = self.backend.open_account()
        weakref.finalize(self, self.account.close).atexit = False
        self.account.add("buffers", sum(buffer.nbytes for buffer in module.buffers()))
        grouping = Grouping(module, ranks, sharding, settings, self.precision, undivided)
        self.groups = grouping.make(self.account)
        self.index_of = {
            id(parameter): (group.index, index)
            for group in self.groups
            for index, parameter in enumerate(group.parameters)
        }
        """By a parameter's identity: the index of its group, and its own there."""
        self.gathering = Gathering(self.groups, self.gather_group, self.progress)
        # A rank that skips a meeting is found at its next operation: a gather, or a reduction.
        meeting = self.gather_group if self.gathering.is_needed else reduce_group
        self.gradients = ModelGradients(self, reduce_group, meeting)
        self.steps = Steps(self.groups, reduce_group, self.progress)
        self.passes = Passes(self, reduce_group, buffer_group)
        self.parameters = Parameters(self)
        self.replicas = ReplicaCheck(
            self.groups,
            self.gradients.groups,
            reduce_group,
            self.progress,
            lambda: self.ownership,
            settings.check_every,
        )
        self._hooks = self.passes.install() + self._hooks
        share_buffers(module, buffer_group)
        self.gathering.free_all()

    def locate(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """The group of a parameter and its index there; None if it is not the model's."""
        return self.index_of.get(id(parameter))

    def dissolve(self) -> None:
        """Gives the parameters memory of their own again, and takes its hooks off the module."""
        values: dict[nn.Parameter, Tensor] = {}
        with self.parameters.full(keep_changes=False):
            for group in self.groups:
                group.to_replicated()
                values |= {parameter: parameter.data.clone() for parameter in group.parameters}
        for parameter, value in values.items():
            parameter.data = value
        for handle in self._hooks:
            handle.remove()
        self.account.close()

    def __reduce__(self) -> NoReturn:
        """Refused."""
        refuse_copy()

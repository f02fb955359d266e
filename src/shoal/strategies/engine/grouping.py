"""From a module to the groups that its parameters travel in."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from shoal.comm.accounting import Account
from shoal.sharding.analyzer import ParameterAnalyzer, ParameterGroup
from shoal.sharding.layout import GroupLayout, balanced_owners
from shoal.strategies.engine.flat_group import FlatGroup, GroupStorage, Residence
from shoal.strategies.layers.precision import Precision
from shoal.strategies.ranks import Ranks
from shoal.strategies.settings import Settings, Sharding


class Grouping:
    """Decides where each parameter lives, and makes the groups' memory."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        sharding: Sharding,
        settings: Settings,
        precision: Precision,
        undivided: Collection[nn.Parameter],
    ) -> None:
        """See `Engine`."""
        self._module, self._ranks = module, ranks
        self._sharding, self._settings = sharding, settings
        self._precision = precision
        self._undivided = {id(parameter) for parameter in undivided}

    def make(self, account: Account) -> list[FlatGroup]:
        """Takes the parameters over, with the first rank's values."""
        groups = []
        load = [0] * self._ranks.shard_group.size
        apart = {id(p): str(self._storage(p)) for p in self._module.parameters()}
        analyzer = ParameterAnalyzer(self._module, self._settings.min_group_bytes, apart)
        for index, found in enumerate(analyzer.groups):
            for parameter in found.parameters:
                self._ranks.all.broadcast(parameter.data)
            layout = self._lay_out(found, load)
            by_name = dict(zip(found.names, found.parameters, strict=True))
            parameters = [by_name[slot.name] for slot in layout.slots]
            storage = self._storage(parameters[0])
            shard_group = self._ranks.shard_group
            groups.append(FlatGroup(index, layout, parameters, shard_group, storage, account))
        return groups

    def _storage(self, parameter: nn.Parameter) -> GroupStorage:
        dtype = self._precision.dtype_of(parameter)
        return GroupStorage(self._residence(parameter), self._sharding.optimizer, dtype)

    def _residence(self, parameter: nn.Parameter) -> Residence:
        """Sharded parameters are gathered, unless the ranks of one host share their memory."""
        shards = self._ranks.shard_group
        is_small = parameter.numel() < self._settings.resident_below
        if not self._sharding.parameters or shards.size == 1 or is_small:
            return Residence.REPLICATED
        is_common = shards.shares_memory and parameter.is_cpu
        return Residence.COMMON if is_common else Residence.SHARDED

    def _lay_out(self, group: ParameterGroup, load: list[int]) -> GroupLayout:
        """Slices of one size, or whole parameters if some of the group's must stay whole."""
        num_ranks = self._ranks.shard_group.size
        shapes = [(n, p.shape) for n, p in zip(group.names, group.parameters, strict=True)]
        if self._undivided.isdisjoint(map(id, group.parameters)):
            return GroupLayout.even(shapes, num_ranks, group.dtype.itemsize)
        owners = balanced_owners([shape.numel() for _, shape in shapes], num_ranks, load)
        return GroupLayout.whole(shapes, owners, num_ranks)

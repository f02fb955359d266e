"""`AsyncSGDOptimizer`: pushes gradients to the servers of parameters, and waits for nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from shoal.optim.independent.average_state import averaged_states, whole_states
from shoal.optim.independent.served_work import ServedByOne, ServedWork
from shoal.optim.kinds import Kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.proof.judgement import Judgement
from shoal.sharding.holding import HeldState
from shoal.strategies.independent.async_model import AsyncModel
from shoal.strategies.options import check_options
from shoal.system.rank_names import name_ranks


class AsyncSGDOptimizer(ShardedOptimizer):
    """Each step pushes this rank's gradients; the servers make it, with state that they have.

    See [Note: servers and workers] and [Note: staleness].

    Example:
        >>> model = AsyncModel(module)
        >>> optimizer = AsyncSGDOptimizer(
        ...     torch.optim.Adam(module.parameters()), model, max_staleness=4, when_stale="damp"
        ... )
        >>> optimizer.staleness.most_common(1)
        [(2, 180)]

    Attributes:
        staleness: How many of this rank's updates had which staleness, of those that counted.
        dropped: The same of those that were dropped.
    """

    model_class = AsyncModel
    model: AsyncModel
    division: ServedWork
    divisions = {  # noqa: RUF012 - as in the class above
        Kind.ELEMENT_WISE: ServedWork,
        Kind.PER_PARAMETER: ServedWork,
        Kind.GLOBAL: ServedByOne,
    }

    def __init__(
        self,
        optimizer: Optimizer,
        model: AsyncModel,
        topology: str | None = None,
        max_staleness: int | None = None,
        when_stale: str | None = None,
        servers: str | Sequence[int] | None = None,
        *,
        partners: str | None = None,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """Makes the optimizer push what this rank computes.

        Args:
            optimizer: The user's.
            model: The wrapped model whose parameters it has.
            topology: This and the following are options of `AsyncModel`. What is not said is the
                model's; what is counts for the model, of which this must be the first optimizer.
            max_staleness: See `AsyncModel`.
            when_stale: See `AsyncModel`.
            servers: See `AsyncModel`.
            partners: See `AsyncModel`.
            kind: See `ShardedOptimizer`.
        """
        self._pair(optimizer, model)
        given = {
            "topology": topology, "max_staleness": max_staleness, "when_stale": when_stale,
            "servers": servers, "partners": partners,
        }  # fmt: skip
        chosen = {name: value for name, value in given.items() if value is not None}
        check_options(chosen, model.strategy, {model.strategy: type(model)})
        self._compare(model, chosen)
        if any(value != model.options[name] for name, value in chosen.items()):
            model.choose(chosen)
        self.staleness: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()
        self._averages: list[HeldState] | None = None
        super().__init__(optimizer, model, kind=kind)

    @property
    def waited_for(self) -> Counter[int]:
        """How often this rank has waited for a slower one, by rank; only with "wait"."""
        return self.model.worker.waited_for

    def describe(self) -> str:
        """Its kind, and what happens to stale updates."""
        options = self.model.options
        servers = name_ranks([self.model.all_ranks.ranks[each] for each in self.model.servers])
        if self.model.is_gossip:
            servers = f"every rank, which averages with {options['partners']} partners"
        limit = f"{options['when_stale']} beyond a staleness of {options['max_staleness']}"
        return f"{super().describe()}; its steps are made on {servers}; {limit}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes this rank's gradients; its parameters change with the next forward's pull."""
        loss = super().step(closure)
        admission = self.division.admission
        assert admission is not None
        (self.staleness if admission.factor else self.dropped)[admission.staleness] += 1
        return loss

    # State --------------------------------------------------------------------------------

    def own_state(self) -> list[HeldState] | None:
        """This rank's, with "gossip"; servers have one state between them."""
        return whole_states(super().held_state()) if self.model.is_gossip else None

    def average_state(self) -> None:
        """With "gossip" the next `held_state` is the average; every rank calls it."""
        own = self.own_state()
        self._averages = None if own is None else averaged_states(own, self.model.meeting_lane)

    def held_state(self) -> Iterator[HeldState]:
        """What this rank serves; with "gossip" the average, once `average_state` was called."""
        averages, self._averages = self._averages, None
        return super().held_state() if averages is None else iter(averages)

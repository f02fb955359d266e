"""What compressed gradients have to save: residuals, factors, and how often there was what.

A residual is a rank's own, so a checkpoint has those of all ranks. At another number of ranks every
rank begins with the mean of them: what the average is yet to get stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.sharding.extent import Extent
from shoal.sharding.holding import Held
from shoal.sharding.split import Split
from shoal.strategies.gradients.compressed.exchange import CompressedExchange, ExchangeQueue

SplitOf = Callable[[str], Split | None]


class CompressionState:
    """The state of one model's compressed gradients on one rank."""

    def __init__(
        self, exchanges: Sequence[CompressedExchange], queue: ExchangeQueue, split_of: SplitOf
    ) -> None:
        """``split_of``: which part of a full parameter this rank's model has."""
        self.exchanges, self._queue, self._split_of = exchanges, queue, split_of
        backend = queue.backend
        self.rank, self.num_ranks = backend.rank, backend.size

    def numbers(self) -> dict[str, int]:
        """How many ranks, steps and exchanges there were."""
        return {
            "ranks": self.num_ranks,
            "steps": self._queue.num_steps,
            "exchanges": self._queue.num_exchanges,
        }

    def held_residual(self) -> Iterator[Held]:
        """This rank's residual, by full names; nothing before the first exchange."""
        for exchange in self.exchanges:
            if exchange.residual is not None and exchange.residual.memory is not None:
                yield from self._cut(exchange, exchange.residual.memory)

    def room(self) -> dict[str, Extent]:
        """What a residual consists of, by full names; nothing without error feedback."""
        return {
            slot.name: self._extent(slot.name, slot.shape)
            for exchange in self.exchanges
            if exchange.residual is not None
            for slot in exchange.group.layout.slots
        }

    def held_factors(self) -> Iterator[tuple[str, Tensor]]:
        """The last right factors, the same on all ranks that average; parts have own names."""
        for exchange in self.exchanges:
            for name, factor in exchange.right.items():
                yield self.factor_name(name), factor

    def factor_names(self) -> dict[str, tuple[str, torch.Size]]:
        """What factors are saved as and what shape they have, by the parameter's full name."""
        return {
            matrix.slot.name: (
                self.factor_name(matrix.slot.name),
                torch.Size((matrix.num_right // matrix.codec.rank, matrix.codec.rank)),
            )
            for exchange in self.exchanges
            for matrix in exchange.plan.matrices
        }

    def factor_name(self, name: str) -> str:
        """What the factor of a parameter, or of this rank's part of it, is saved as."""
        split = self._split_of(name)
        if split is None:
            return name
        runs = "+".join(f"{start}-{stop}" for start, stop in split.runs)
        return f"{name}/{split.dim}:{runs}"

    @torch.no_grad()
    def receive(
        self,
        numbers: Mapping[str, int],
        residuals: Mapping[str, Sequence[Tensor]],
        factors: Mapping[str, Tensor],
    ) -> None:
        """Takes over a state: what is not in it begins anew.

        ``residuals`` are this rank's former one, or those of all former ranks, flat.
        """
        self._queue.num_steps = numbers.get("steps", 0)
        self._queue.num_exchanges = numbers.get("exchanges", 0)
        for exchange in self.exchanges:
            exchange.right = {
                matrix.slot.name: factors[matrix.slot.name].to(exchange.group.master.device)
                for matrix in exchange.plan.matrices
                if matrix.slot.name in factors
            }
            self._receive_residual(exchange, residuals)

    def _receive_residual(
        self, exchange: CompressedExchange, residuals: Mapping[str, Sequence[Tensor]]
    ) -> None:
        residual, group = exchange.residual, exchange.group
        if residual is None:
            return
        like = group.master.new_empty(group.layout.num_elements)
        memory = residual.allocate(like).zero_()
        for slot in group.layout.slots:
            saved = residuals.get(slot.name, ())
            for each in saved:
                memory[slot.start : slot.stop] += each.to(memory) / len(saved)

    def _cut(self, exchange: CompressedExchange, memory: Tensor) -> Iterator[Held]:
        for slot in exchange.group.layout.slots:
            extent = self._extent(slot.name, slot.shape)
            yield Held(slot.name, extent, memory[slot.start : slot.stop])

    def _extent(self, name: str, shape: torch.Size) -> Extent:
        split = self._split_of(name)
        return Extent.whole(shape if split is None else split.shape, split)

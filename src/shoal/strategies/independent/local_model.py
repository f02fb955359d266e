"""`LocalModel`: replicas that are trained apart for some steps, and then averaged.

[Note: rounds of local steps]
A *round* is `every` steps of one optimizer. Within it a rank's parameters, gradients, buffers and
optimizer state are its own. At its end, the *boundary*, all ranks have the same parameters and
buffers again; the optimizer's state stays a rank's own. Each optimizer has rounds of its own, over
the parameters that it steps. Checkpoints are made at boundaries, where one set of parameters is
enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm import Backend, World
from shoal.comm.operation.whole import Barrier
from shoal.errors import ShoalError
from shoal.strategies.consistency.drift import ReplicaCheck, is_due
from shoal.strategies.consistency.rounds import Vote
from shoal.strategies.gradients.compressed.exchange import CompressedExchange, ExchangeQueue
from shoal.strategies.gradients.compressed.state import CompressionState
from shoal.strategies.independent.averaging import average_tensors
from shoal.strategies.independent.replica_model import ReplicaModel
from shoal.strategies.layers.buffers import share_buffers
from shoal.strategies.options import check_type

Outer = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the optimizer that takes the step at a boundary."""
OUTER_IN_WORDS = (
    "outer must be a function that makes an optimizer from a list of parameters, such as "
    "lambda parameters: SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
)


class LocalModel(ReplicaModel):
    """Every rank trains by itself for some steps; then parameters are averaged over the ranks.

    Example:
        >>> model = LocalModel(module, every=100)
        >>> optimizer = LocalSGDOptimizer(torch.optim.AdamW(module.parameters()), model)
    """

    strategy = "local"
    own_attributes = (*ReplicaModel.own_attributes, "exchange_queue", "num_boundaries")
    exchange_queue: ExchangeQueue | None
    """Where what is averaged travels compressed."""

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        every: int = 50,
        outer: Outer | None = None,
        **options: Any,
    ) -> None:
        """Takes over the module's parameters; every rank starts from rank 0's values.

        Args:
            module: The user's.
            world: The ranks that train it; the current world by default.
            every: After how many steps of an optimizer its parameters are averaged.
            outer: Makes the optimizer of the averages from a list of parameters. Their gradient is
                what they were minus the average of what they became. By default the average itself
                counts.
            options: See `ShardedModel`. ``check_every`` counts averages here, and ``compression``
                is that of what is averaged: what a round changed.
        """
        check_every_steps(every)
        check_outer(outer)
        super().__init__(module, world, **options)
        self.options |= {"every": every, "outer": outer}
        self.exchange_queue, self.num_boundaries = None, 0
        self.all_ranks.compare_at_exit(self)

    def exchanging(self) -> ExchangeQueue | None:
        """Where compressed averages travel; None if they are not compressed."""
        compression = self.engine.settings.compression
        if self.exchange_queue is None and compression is not None and self.all_ranks.size > 1:
            self.exchange_queue = ExchangeQueue(self.all_ranks.lane(self))
        return self.exchange_queue

    # Boundaries; see [Note: rounds of local steps] ------------------------------------------

    @property
    def is_at_boundary(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return all(not optimizer.num_local_steps for optimizer in self.optimizers)

    def meet(self, doing: str) -> None:
        """All ranks are here, and have trained alike; ``doing`` is what they are at, in words."""
        Vote.cast(self.meeting_lane, self.engine.progress, doing)

    def end_round(self) -> None:
        """An optimizer has averaged its parameters; every rank calls it."""
        self.synchronize_buffers()
        if self.is_at_boundary:
            self.num_boundaries += 1
            if is_due(self.num_boundaries, self.engine.settings.check_every):
                self._compare_replicas("the average of parameters")

    def _compare_replicas(self, doing: str) -> None:
        ReplicaCheck(self.engine, self.meeting_lane).check(doing)

    def _begin_rounds(self) -> None:
        """All ranks have been given the same parameters."""
        for optimizer in self.optimizers:
            optimizer.begin_round()

    def check_ranks(self, doing: str) -> None:
        """Raises between boundaries, or if the ranks do not train alike; every rank calls it."""
        for optimizer in self.optimizers:
            if optimizer.num_local_steps:
                raise ShoalError(
                    f"{doing} in the middle of a round: {optimizer.num_local_steps} of "
                    f"{optimizer.every} steps were made since the ranks' parameters were averaged, "
                    "so each rank has other ones. Call optimizer.average() on every rank first, "
                    f"which ends the round, or call {doing} where optimizer.num_local_steps is 0"
                )
        self.meet(doing)
        self._compare_replicas(doing)
        for optimizer in self.optimizers:
            optimizer.average_state()

    def exit_record(self) -> str:
        """What a rank leaves behind for those that leave after it."""
        return self.engine.progress.exit_record()

    def check_exit_records(self, records: Mapping[int, str]) -> None:
        """Raises if a rank that left before has trained in another way."""
        self.engine.progress.check_exit_records(records)

    # What all ranks have --------------------------------------------------------------------

    def synchronize_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, or the average; every rank calls it.

        At a boundary it is done anyway.
        """
        averages = self.engine.settings.averages_buffers
        share_buffers(self.module.buffers(), self.meeting_lane, averages=averages)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The average of all ranks' parameters, under the module's names; every rank calls it.

        Nothing changes by it: in the middle of a round every rank goes on with its own.
        """
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        buffers = {f"{prefix}{name}" for name, _ in self.module.named_buffers()}
        held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        averages = self.engine.settings.averages_buffers
        own = [value for name, value in held.items() if name in buffers]
        share_buffers(own, self.meeting_lane, averages=averages)
        if self.is_at_boundary:
            self.meeting_lane.run(Barrier("state_dict() of a local model"))
        else:
            trained = [value for name, value in held.items() if name not in buffers]
            average_tensors(trained, self.meeting_lane, "state_dict() in the middle of a round")
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a full state; every rank calls it. A round begins."""
        outcome = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._begin_rounds()
        return outcome

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Inside, what `held` gives may be written to; afterwards a round begins."""
        with super().receiving():
            yield
        self._begin_rounds()

    @property
    def compression_state(self) -> CompressionState | None:
        """What compressed averages have to save; None where they are not compressed."""
        if self.exchange_queue is None:
            return None
        exchanges: list[CompressedExchange] = [
            exchange for optimizer in self.optimizers for exchange in optimizer.exchanges()
        ]
        return CompressionState(exchanges, self.exchange_queue, self.split_of)

    def _compression_in_words(self) -> Iterator[str]:
        compression = self.engine.settings.compression
        if compression is not None:
            feedback = "" if compression.error_feedback else ", without error feedback"
            yield f"what a round changed is averaged as {compression.codec}{feedback}"


def check_every_steps(every: int) -> None:
    """Refuses what is no number of steps."""
    check_type("every", every, int)
    if every < 1:
        raise ValueError(f"every must be at least 1, the steps between two averages; got {every}")


def check_outer(outer: object) -> None:
    """Refuses what is no function, such as an optimizer."""
    if outer is not None and not callable(outer):
        raise TypeError(f"{OUTER_IN_WORDS}; got a {type(outer).__name__}")

"""`Undivided`: every rank makes the same step on everything."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.division.work_division import Closure, WorkDivision
from shoal.optim.state import Reception, held_whole, receive_whole
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.holding import FullState, HeldState
from shoal.strategies.model import ShardedModel

DECLARE = (
    "If it works element by element or parameter by parameter, say so with "
    'kind="element-wise" or "per-parameter".'
)
"""What to do about an optimizer that is taken for one that couples its parameters."""


class Undivided(WorkDivision):
    """For optimizers that may couple any of their parameters."""

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Refuses mixed precision, in which no rank has all masters."""
        if model.engine.settings.compute_dtype is not None:
            raise ValueError(
                f"mixed_precision does not go with {type(optimizer).__name__}, which may couple "
                f"any of its parameters. {DECLARE}"
            )

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """Warns where the user wanted the state to be divided."""
        super().__init__(model, supervision)
        if model.sharding.optimizer:
            warnings.warn(
                f"{type(self.optimizer).__name__} may couple any of its parameters, so every rank "
                f"steps all of them: the result is right, but no memory is saved. {DECLARE}",
                stacklevel=3,
            )

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The user's optimizer's own."""
        return self.optimizer.state

    def step(self, closure: Closure | None, check_ranks: Closure) -> Any:
        """Every rank makes the same step on everything."""

        def evaluate() -> Any:
            with self.supervision.outside_of_step():
                loss = self.mean(closure()) if closure is not None else None
                self.engine.gradients.gather(self._num_averaged)
            return loss

        if closure is None:
            evaluate()
            check_ranks()
        with self.engine.parameters.full(), self.supervision.step():
            loss = self.optimizer.step(evaluate if closure is not None else None)
        # The step may have changed the gradients, in the same way on all ranks.
        with self.engine.gradients.hand_made.final():
            self.engine.gradients.hand_made.adopt()
        self.note_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer has all of it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def held_state(self) -> Iterator[HeldState]:
        """All of it."""
        return held_whole(self.optimizer, self.names)

    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for all of it."""
        return receive_whole(self.optimizer, self.names, saved, options)

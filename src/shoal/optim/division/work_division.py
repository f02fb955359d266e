"""`WorkDivision`: what a rank steps of an optimizer's parameters, and has of their state.

`Undivided` is the one that divides nothing: every rank makes the same step on everything.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.state import Reception, held_whole, receive_whole
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.holding import FullState, HeldState
from shoal.strategies.engine.engine import Engine
from shoal.strategies.model import ShardedModel
from shoal.torch_internals.trees import tree_leaves

Closure = Callable[[], Any]


class WorkDivision(ABC):
    """How the work of one optimizer is divided over the ranks."""

    lays_out_memory: ClassVar[bool] = False
    """Whether the model's memory is laid out for it, so that it must be made before others."""

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """Of an optimizer that `admit` has let pass."""
        self.model, self.supervision = model, supervision
        self.optimizer, self.parameters = supervision.optimizer, supervision.parameters
        self.flat_parameters = [each for group in self.parameters for each in group]
        self.names = {id(each): self._find_name(each) for each in self.flat_parameters}
        """Full names of the parameters, by their id."""
        self._num_averaged = self._num_states = self._state_bytes = 0
        self._hooks: list[Any] = []

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Raises if the optimizer's work cannot be divided like this over the model's ranks."""

    @property
    def engine(self) -> Engine:
        """The model's."""
        return self.model.engine

    def _find_name(self, parameter: nn.Parameter) -> str:
        group, index = self.engine.index_of[id(parameter)]
        return self.engine.groups[group].names[index]

    # What each division does ----------------------------------------------------------------

    @property
    @abstractmethod
    def state(self) -> Mapping[Tensor, Any]:
        """The state on this rank, by the user's parameters."""

    @abstractmethod
    def step(self, closure: Closure | None, check_ranks: Closure) -> Any:
        """One step of the user's optimizer; returns the mean loss, if there is a closure.

        ``check_ranks`` is called when the gradients are there and nothing has been stepped yet.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would have it; every rank calls it."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state; every rank calls it."""

    @abstractmethod
    def held_state(self) -> Iterator[HeldState]:
        """This rank's part of the state, under full names."""

    @abstractmethod
    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for a state that is loaded; see `ShardedOptimizer.receive`."""

    # What all have in common ----------------------------------------------------------------

    def let_go(self) -> None:
        """Takes its hooks off the user's optimizer and drops the state there is."""
        for handle in self._hooks:
            handle.remove()
        self.optimizer.state.clear()

    def mean(self, loss: Any) -> Any:
        """The loss of the whole batch: what a closure returns is this rank's."""
        if not isinstance(loss, Tensor):
            return loss
        return self.engine.backend.all_reduce(loss.detach().clone(), "average")

    def note_step(self) -> None:
        """After a step: the gradients have been used, and there may be more state than before."""
        self._num_averaged = self.engine.gradients.num_averaged
        if len(self.optimizer.state) != self._num_states:
            self.count_state()

    def count_state(self) -> None:
        """Says how much memory the state takes."""
        self._num_states = len(self.optimizer.state)
        tensors = tree_leaves(list(self.optimizer.state.values()))
        held = sum(value.nbytes for value in tensors if isinstance(value, Tensor))
        self.engine.account.add("state", held - self._state_bytes)
        self._state_bytes = held


DECLARE = (
    "If it works element by element or parameter by parameter, say so with "
    'kind="element-wise" or "per-parameter".'
)
"""What to do about an optimizer that is taken for one that couples its parameters."""


class Undivided(WorkDivision):
    """For optimizers that may couple any of their parameters."""

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Refuses what leaves no rank with all masters."""
        settings = model.engine.settings
        for option, chosen in (
            ("mixed_precision", settings.compute_dtype),
            ("gather_compression", settings.gather_codec),
        ):
            if chosen is not None:
                raise ValueError(
                    f"{option} does not go with {type(optimizer).__name__}, which may couple any "
                    f"of its parameters. {DECLARE}"
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

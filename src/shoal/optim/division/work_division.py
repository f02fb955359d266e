"""`WorkDivision`: what a rank steps of an optimizer's parameters, and has of their state."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.state.reception import Reception
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.holding import FullState, HeldState
from shoal.strategies.engine.engine import Engine
from shoal.strategies.model import ShardedModel
from shoal.torch_internals.trees import tree_leaves

Closure = Callable[[], Any]


class WorkDivision(ABC):
    """How the work of one optimizer is divided over the ranks.

    Attributes:
        optimizer: The user's.
        model: The wrapped model whose parameters it has.
        parameters: Those of each parameter group, as the user gave them.
        is_stepping: Whether a step of the user's optimizer is being made from here.
    """

    lays_out_memory: ClassVar[bool] = False
    """Whether the model's memory is laid out for it, so that it must be made before others."""

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """Of an optimizer that `admit` has let pass."""
        self.model, self.supervision = model, supervision
        self.optimizer, self.parameters = supervision.optimizer, supervision.parameters
        self.is_stepping = False
        self._num_averaged = self._num_states = self._state_bytes = 0

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Raises if the optimizer's work cannot be divided like this over the model's ranks."""

    @property
    def engine(self) -> Engine:
        """The model's."""
        return self.model.engine

    @property
    def flat_parameters(self) -> list[nn.Parameter]:
        """Those of all parameter groups in a row."""
        return [parameter for group in self.parameters for parameter in group]

    # What each division does ----------------------------------------------------------------

    @property
    @abstractmethod
    def state(self) -> Mapping[Tensor, Any]:
        """The state on this rank, by the user's parameters."""

    @abstractmethod
    def step(self, closure: Closure | None, check_ranks: Closure) -> Any:
        """One step of the user's optimizer.

        Args:
            closure: The user's, if any; it computes the loss.
            check_ranks: Is called when the gradients are there and nothing has been stepped yet.

        Returns:
            The loss of the whole batch, if there is a closure.
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

    @property
    def names(self) -> dict[int, str]:
        """Full names of the parameters, by their id."""
        return {id(parameter): self.name_of(parameter) for parameter in self.flat_parameters}

    def name_of(self, parameter: nn.Parameter) -> str:
        """The full name of a parameter."""
        group, index = self.locate(parameter)
        return self.engine.groups[group].names[index]

    def locate(self, parameter: nn.Parameter) -> tuple[int, int]:
        """The group of memory that a parameter is in, and its index there."""
        found = self.engine.locate(parameter)
        assert found is not None  # it was checked when the optimizer was wrapped
        return found

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step of the user's optimizer."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

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

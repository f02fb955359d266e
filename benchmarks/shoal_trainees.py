"""Training with shoal: a strategy over a backend."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from trainee import Course, Trainee

from shoal.comm import Backend
from shoal.optim import PAIRS

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
"""Those that divide the batch; others give all ranks of a group the same one."""


class Held(NamedTuple):
    """Bytes on one rank between a step and the next forward."""

    parameters: int
    gradients: int
    state: int


class ShoalTrainee(Trainee):
    """What `shoal.as_distributed` gives, in a world that need not be the current one."""

    def __init__(self, course: Course, backend: Backend, strategy: str, **options: Any) -> None:
        model_class, optimizer_class = PAIRS[strategy]
        module = course.model()
        optimizer = course.optimizer(module.parameters())
        model = model_class(module, backend, **options)
        super().__init__(course, backend.rank, model, optimizer_class(optimizer, model))

    def parameters(self) -> dict[str, Tensor]:
        """Gathered where they are sharded."""
        return dict(self.model.state_dict())

    def held(self) -> Held:
        """What this rank holds now."""
        return held_bytes(self.model, self.optimizer)


def held_bytes(model: Any, optimizer: Any) -> Held:
    """What a rank holds of a wrapped model and its optimizer."""
    engine = model.engine
    values = [value for state in optimizer.state.values() for value in state.values()]
    return Held(
        sum(group.num_bytes_held for group in engine.groups),
        sum(gradients.num_bytes_held for gradients in engine.gradients),
        sum(value.nbytes for value in values if isinstance(value, Tensor)),
    )

"""Training with plain torch: alone, side by side, and with torch's own ways to communicate.

torch's ways get the settings that were the fastest here: gradients and parameters are views of
the buckets that travel.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainee import Course, Trainee
from worlds import Venue


class Independent(Trainee):
    """No communication at all: each rank has a model of its own."""

    is_common = False

    def __init__(self, course: Course, venue: Venue) -> None:
        model = course.model()
        super().__init__(course, venue.rank, model, course.optimizer(model.parameters()))

    def parameters(self) -> dict[str, Tensor]:
        """The model's."""
        return dict(self.model.named_parameters())


class Alone(Independent):
    """Rank 0 has the machine to itself; the others wait for it where all ranks meet next."""

    def __init__(self, course: Course, venue: Venue) -> None:
        super().__init__(course, venue)
        self._is_idle = venue.rank != 0

    def step(self) -> None:
        """Does nothing on all ranks but the first."""
        if not self._is_idle:
            super().step()


class TorchDDP(Trainee):
    """`DistributedDataParallel`."""

    def __init__(self, course: Course, venue: Venue) -> None:
        model = DistributedDataParallel(course.model(), gradient_as_bucket_view=True)
        super().__init__(course, venue.rank, model, self._optimizer(course, model))

    def _optimizer(self, course: Course, model: nn.Module) -> Any:
        return course.optimizer(model.parameters())

    def parameters(self) -> dict[str, Tensor]:
        """The wrapped model's."""
        return dict(self.model.module.named_parameters())


class TorchZeRO1(TorchDDP):
    """`ZeroRedundancyOptimizer` on top of it."""

    def _optimizer(self, course: Course, model: nn.Module) -> Any:
        # With this import comes a warning of torch's about itself.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **course.adamw_options,
        )


class FullyShard(Trainee):
    """`fully_shard` on each block of the model, then on the rest of it."""

    def __init__(self, course: Course, venue: Venue) -> None:
        model: Any = course.model()
        for part in self._parts(model):
            fully_shard(part)
        fully_shard(model)
        super().__init__(course, venue.rank, model, course.optimizer(model.parameters()))

    def _parts(self, model: GPT) -> list[nn.Module]:
        return list(model.blocks)

    def parameters(self) -> dict[str, Tensor]:
        """Gathered."""
        state: dict[str, Any] = self.model.state_dict()
        return {name: value.full_tensor() for name, value in state.items()}


class FullyShardLeaves(FullyShard):
    """`fully_shard` on each layer that is called; the model itself reads its embeddings."""

    def _parts(self, model: GPT) -> list[nn.Module]:
        # What torch warns of, changing a layer's output in place, is not done here.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        return [part for part in model.modules() if isinstance(part, nn.Linear | nn.LayerNorm)]

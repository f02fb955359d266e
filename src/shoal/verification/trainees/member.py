"""One rank of the distributed training that is put to the test."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.world import World
from shoal.strategies import PipelineParallelModel
from shoal.verification.trainees.batches import share
from shoal.verification.trainees.dice import Dice
from shoal.verification.trainees.single import BUILD_SEED, rank_dice
from shoal.verification.trainees.trainee import Build, Parts, Seen, Trainee

# Makes a model and its optimizers distributed.
Wrap = Callable[..., Any]


class Member(Trainee):
    """Trains on its rows of each global batch, with everybody else.

    Gradients and parameters are gathered to be looked at, so all ranks walk together.
    """

    def __init__(
        self,
        build: Build,
        num_steps: int,
        world: World,
        wrap: Wrap,
        weight: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """``wrap(model, optimizers)`` makes them distributed."""
        self._world, self._weight = world, weight
        with Dice(BUILD_SEED).rolling():
            self.parts = Parts.build(build, num_steps)
        self.parts.model, self.parts.optimizers = wrap(self.parts.model, self.parts.optimizers)
        for optimizer in self.parts.optimizers:
            optimizer.supervision.seed(BUILD_SEED)  # type: ignore[attr-defined]
        self.data_group: Backend = self.parts.model.data_group  # type: ignore[assignment]
        """The ranks that get other rows than this one."""
        self.parts.model.engine.input_watch.stop()  # type: ignore[operator, union-attr]
        self._dice = rank_dice(self.data_group.rank)
        self.fingerprints: dict[tuple[str, str], str] = {}
        """What this rank has of each thing that all ranks must have alike, as a few bytes."""

    def compute(self, step: int) -> Tensor:
        """Forward and backward of this rank's rows."""
        data = self.data_group
        inputs, targets = share(self.parts.batches[step], data.rank, data.size)
        how = {} if self._weight is None else {"weight": float(self._weight(inputs, targets))}
        with self._dice.rolling():
            loss: Tensor = self.parts.model.train_step(inputs, targets, self.parts.loss_fn, **how)  # type: ignore[operator]
        self.fingerprints["loss", ""] = fingerprint(loss)
        return loss

    @property
    def num_micro_batches(self) -> int:
        """How many parts a rank's rows are cut into."""
        model: Any = self.parts.model
        if not isinstance(model, PipelineParallelModel):
            return 1
        return model.pipeline.micro_batches

    def gradients(self) -> Iterator[Seen]:
        """Joined from the ranks' parts; where a rank has all of one, that must be alike."""
        here = dict(self.parts.model.named_parameters())
        for name, whole in self.parts.model.full_gradients():  # type: ignore[operator]
            gradient = here[name].grad if name in here else None
            if type(gradient) is Tensor:  # a plain one, not a stand-in for a part of one
                self.fingerprints["gradient", name] = fingerprint(gradient)
            yield Seen("gradient", name, whole)

    def parameters(self) -> Iterator[Seen]:
        """Whole on every rank."""
        with self.parts.model.full_parameters():  # type: ignore[operator]
            for name, parameter in self.parts.model.named_parameters():
                value = parameter.detach()
                self.fingerprints["parameter", name] = fingerprint(value)
                yield Seen("parameter", name, value)

    def update(self, step: int) -> None:
        """The optimizers' step."""
        with self._dice.rolling():
            super().update(step)

    def spread(self, name: str) -> tuple[float, float]:
        """How far the ranks are apart in a parameter: at most, and relative to its values."""
        found = [seen.value.double() for seen in self.parameters() if seen.name == name]  # type: ignore[union-attr]
        if not found:
            return math.nan, math.nan
        everybody = self._world.all_gather(found[0].reshape(1, -1))
        apart = float((everybody.amax(0) - everybody.amin(0)).max())
        return apart, apart / max(float(everybody.abs().max()), 1e-300)


def fingerprint(tensor: Tensor) -> str:
    """Equal for equal bits."""
    # A copy, because torch never again frees a storage that numpy has seen.
    flat = tensor.detach().reshape(-1, 1).to("cpu", copy=True)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()

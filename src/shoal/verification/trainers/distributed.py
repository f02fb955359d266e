"""One rank of the distributed training that is put to the test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from shoal.comm import Backend
from shoal.comm.world import World
from shoal.strategies import LocalModel, PipelineParallelModel
from shoal.torch_support.fingerprint import fingerprint
from shoal.torch_support.random_state import RandomStream
from shoal.verification.trainers.one_process import BUILD_SEED, rank_stream
from shoal.verification.trainers.trainer import Build, Observed, Setup, Trainer, share

# Makes a model and its optimizers distributed.
Wrap = Callable[..., Any]


class DistributedTrainer(Trainer):
    """Trains on its rows of each global batch, together with the other ranks.

    Gradients and parameters are gathered to be looked at, so all ranks do it together.
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
        with RandomStream(BUILD_SEED).drawing():
            self.setup = Setup.build(build, num_steps)
        self.setup.model, self.setup.optimizers = wrap(self.setup.model, self.setup.optimizers)
        for optimizer in self.setup.optimizers:
            optimizer.supervision.seed(BUILD_SEED)  # type: ignore[attr-defined]
        self.data_group: Backend = self.setup.model.data_group  # type: ignore[assignment]
        """The ranks that get other rows than this one."""
        self.setup.model.engine.input_watch.stop()  # type: ignore[operator, union-attr]
        self._stream = rank_stream(self.data_group.rank)
        self.fingerprints: dict[tuple[str, str], str] = {}
        """What this rank has of each thing that all ranks must have alike, as a few bytes."""

    def compute(self, step: int) -> Tensor:
        """Forward and backward of this rank's rows."""
        data = self.data_group
        inputs, targets = share(self.setup.batches[step], data.rank, data.size)
        how = {} if self._weight is None else {"weight": float(self._weight(inputs, targets))}
        with self._stream.drawing():
            loss: Tensor = self.setup.model.train_step(inputs, targets, self.setup.loss_fn, **how)  # type: ignore[operator]
        self.fingerprints.clear()
        self._note("loss", "", loss)
        return loss

    def _note(self, kind: str, name: str, value: Tensor) -> None:
        """Replicas that are trained apart have the same parameters now and then, and no more."""
        model = self.setup.model
        if not isinstance(model, LocalModel) or (kind == "parameter" and model.is_at_boundary):
            self.fingerprints[kind, name] = fingerprint(value, most_elements=None)

    @property
    def num_micro_batches(self) -> int:
        """How many parts a rank's rows are cut into."""
        model: Any = self.setup.model
        if not isinstance(model, PipelineParallelModel):
            return 1
        return model.pipeline.micro_batches

    def gradients(self) -> Iterator[Observed]:
        """Joined from the ranks' parts; where a rank has all of one, that must be alike."""
        here = dict(self.setup.model.named_parameters())
        for name, whole in self.setup.model.full_gradients():  # type: ignore[operator]
            gradient = here[name].grad if name in here else None
            if type(gradient) is Tensor:  # a plain one, not a stand-in for a part of one
                self._note("gradient", name, gradient)
            yield Observed("gradient", name, whole)

    def parameters(self) -> Iterator[Observed]:
        """Whole on every rank."""
        with self.setup.model.full_parameters():  # type: ignore[operator]
            for name, parameter in self.setup.model.named_parameters():
                value = parameter.detach()
                self._note("parameter", name, value)
                yield Observed("parameter", name, value)

    def update(self, step: int) -> None:
        """The optimizers' step."""
        with self._stream.drawing():
            super().update(step)

    def spread(self, name: str) -> tuple[float, float]:
        """How far the ranks are apart in a parameter: at most, and relative to its values."""
        found = [seen.value.double() for seen in self.parameters() if seen.name == name]  # type: ignore[union-attr]
        if not found:
            return math.nan, math.nan
        by_rank = self._world.all_gather(found[0].reshape(1, -1))
        apart = float((by_rank.amax(0) - by_rank.amin(0)).max())
        return apart, apart / max(float(by_rank.abs().max()), 1e-300)

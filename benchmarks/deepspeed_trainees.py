"""Training with DeepSpeed, where it is installed: ZeRO of stage 1, 2 or 3 on the CPU.

It is no dependency of shoal's. To compare with it, give it an environment of its own that also
sees the one of `make setup`, and run the benchmark from there:

    python -m venv /tmp/ds && . /tmp/ds/bin/activate
    realpath .venv/lib/python3*/site-packages > $(echo /tmp/ds/lib/python3*/site-packages)/shoal.pth
    pip install setuptools wheel && pip install --no-build-isolation deepspeed
    python benchmarks/training.py
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from trainee import Course, Trainee
from worlds import Venue


class DeepSpeedTrainee(Trainee):
    """DeepSpeed's engine around the same model and AdamW; it uses torch's default group."""

    def __init__(self, course: Course, venue: Venue, stage: int) -> None:
        with _linear_restored():
            self._build(course, venue, stage)
            self._linear = F.linear

    def _build(self, course: Course, venue: Venue, stage: int) -> None:
        deepspeed = _library()
        model = course.model()
        config = {
            "train_micro_batch_size_per_gpu": course.shape.batch,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=course.optimizer(model.parameters()),
            config=config,
            dist_init_required=False,
        )
        super().__init__(course, venue.rank, engine, optimizer)
        self._is_sharded = stage == 3

    def step(self) -> None:
        """With the linear function of its own that it had put into torch."""
        with _linear_restored():
            F.linear = self._linear
            super().step()

    def _clear(self) -> None:
        """The engine's step does it."""

    def _backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def _update(self) -> None:
        self.model.step()

    def parameters(self) -> dict[str, Tensor]:
        """Gathered where they are sharded."""
        named = dict(self.model.module.named_parameters())
        if not self._is_sharded:
            return named
        with _library().zero.GatheredParameters(list(named.values())):
            return {name: value.detach().clone() for name, value in named.items()}


@contextlib.contextmanager
def _linear_restored() -> Iterator[None]:
    """Keeps torch's linear function for the others.

    Stage 3 replaces it for every model of the process. On 40 layers independent processes, which
    have nothing to do with DeepSpeed, took half as long again.
    """
    before = F.linear
    try:
        yield
    finally:
        F.linear = before


def why_not() -> str | None:
    """Why there is no DeepSpeed here; None if there is."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed; benchmarks/deepspeed_trainees.py says how to"
    return None


def _library() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # It calls functions of torch's by their old names, and says a lot.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed

"""The ranks' side of `scaling.py`: what each strategy holds, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from gpt import Shape
from shoal_trainees import STRATEGIES, Held, ShoalTrainee
from timing import alternate
from trainee import Course

import shoal
from shoal.comm import Backend

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        shape: Of the model; its batch is for all ranks together, who divide it.
        rounds: How many steps of each strategy.
        strategies: Which.
    """

    shape: Shape
    rounds: int
    strategies: tuple[str, ...] = STRATEGIES

    def course_on(self, ranks: int) -> Course:
        """What each of so many ranks trains."""
        batch, rest = divmod(self.shape.batch, ranks)
        if rest:
            raise ValueError(f"{self.shape.batch} sequences do not divide by {ranks} ranks")
        return Course(replace(self.shape, batch=batch))


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Called on every rank; one row for each strategy."""
    torch.set_num_threads(1)
    backend = shoal.world().backend
    course = plan.course_on(backend.size)
    trainees = {name: ShoalTrainee(course, backend, name) for name in plan.strategies}
    turns = {name: trainee.step for name, trainee in trainees.items()}
    alternate(turns, backend, _WARM_UP_ROUNDS)
    times = alternate(turns, backend, plan.rounds)
    return [
        {
            "ranks": backend.size,
            "strategy": name,
            "parameters": sum(p.numel() for p in course.model().parameters()),
            "held_bytes": _largest(trainee.held(), backend)._asdict(),
            "times_s": times[name].as_dict(),
        }
        for name, trainee in trainees.items()
    ]


def _largest(held: Held, backend: Backend) -> Held:
    """What the rank with the most holds, of each."""
    return Held(*backend.all_reduce(torch.tensor(held), "max").tolist())

"""The ranks' side of `training.py`: all contenders in the same processes, in one run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from roster import ROSTER
from timing import Times, alternate
from torch import Tensor
from trainee import Course, Trainee
from worlds import Venue

import shoal

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        course: What is trained.
        contenders: Names of the roster.
        rounds: How often each contender has its turn.
        steps: How many steps a turn has; its time is divided by them.
    """

    course: Course
    contenders: tuple[str, ...]
    rounds: int
    steps: int = 1


def hold(plan: Plan) -> list[dict[str, Any]]:
    """Measures everything; called on every rank of a world over shared memory."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        venue = Venue.open(shoal.world().backend, stack)
        trainees = {name: ROSTER[name](plan.course, venue) for name in plan.contenders}
        turns = {name: _turn(trainee, plan.steps) for name, trainee in trainees.items()}
        alternate(turns, venue.shm, _WARM_UP_ROUNDS)
        # Else each collection would look through the models of all contenders.
        gc.collect()
        gc.freeze()
        times = alternate(turns, venue.shm, plan.rounds)
        differences = compare(trainees, venue)
        have_learned = {name: _all_learned(trainee, venue) for name, trainee in trainees.items()}
        venue.shm.barrier()
    shape = plan.course.shape
    return [
        {
            "shape": shape.key,
            "title": str(shape),
            "parameters": sum(p.numel() for p in plan.course.model().parameters()),
            "contender": name,
            **_seconds(each.divided_by(plan.steps)),
            "difference": differences.get(name),
            "has_learned": have_learned[name],
        }
        for name, each in times.items()
    ]


def _seconds(times: Times) -> dict[str, float]:
    return {"median_s": times.median, "low_s": times.low, "high_s": times.high}


def _turn(trainee: Trainee, steps: int) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(steps):
            trainee.step()

    return turn


def compare(trainees: Mapping[str, Trainee], venue: Venue) -> dict[str, float]:
    """How far the parameters of contenders are from those of the first that communicates.

    All have made as many steps on the same batches, so nothing but rounding may differ.

    Returns:
        The largest difference of any element on any rank, by contender.
    """
    common = {name: trainee for name, trainee in trainees.items() if trainee.is_common}
    reference: dict[str, Tensor] = {}
    differences = []
    for trainee in common.values():
        parameters = {name: value.detach() for name, value in trainee.parameters().items()}
        reference = reference or parameters
        if parameters.keys() != reference.keys():
            raise RuntimeError(f"{type(trainee).__name__} has other parameters than the model")
        distances = [(parameters[name] - reference[name]).abs().max() for name in reference]
        differences.append(torch.stack(distances).max().double())
    if not common:
        return {}
    largest = venue.shm.all_reduce(torch.stack(differences), "max").tolist()
    return dict(zip(common, largest, strict=True))


def _all_learned(trainee: Trainee, venue: Venue) -> bool:
    return all(venue.shm.all_gather_object(trainee.has_learned))

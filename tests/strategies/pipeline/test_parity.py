"""Pipelines train to the parameters of one process, whatever the schedule, cut and model."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import shoal
from pools import Team
from strategies.pipeline.tasks import TASKS
from strategies.pipeline.training import case, check, train_rank, train_rank_of_pool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
MODES = ("plain", "clip", "accumulate")


def run(wanted) -> None:
    check(wanted, shoal.run(train_rank, wanted.ranks, "memory", args=(wanted,)))


def _chunks(schedule, ranks):
    # The GPT has four blocks.
    return {"chunks": 1} if schedule == "interleaved" and ranks > 2 else {}


MATRIX = [
    case(ranks=ranks, schedule=schedule, micro_batches=count, mode=mode, **_chunks(schedule, ranks))
    for ranks, schedule, count, mode in itertools.product((2, 3, 4), SCHEDULES, (1, 4, 7), MODES)
]
# A part in which every choice occurs with most of the others; the first for as long as the rest.
PAIRS = [
    dataclasses.replace(wanted, steps=20 if index == 0 else 5)
    for index, wanted in enumerate(MATRIX[::10])
]


@pytest.mark.parametrize("wanted", PAIRS, ids=str)
def test_schedules(wanted) -> None:
    run(wanted)


@pytest.mark.full
@pytest.mark.parametrize("wanted", MATRIX, ids=str)
def test_all_schedules(wanted) -> None:
    run(wanted)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"gpt"}))
def test_models(task) -> None:
    run(case(task, 3, "clip", steps=3, micro_batches=3))


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_all_models(task, ranks, schedule) -> None:
    run(case(task, ranks, "accumulate", steps=8, micro_batches=3, schedule=schedule))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_beside_data_parallelism(zero) -> None:
    """Small groups, so that there are several; tied weights, clipped over both axes."""
    schedule = ("1f1b", "zero-bubble", "interleaved", "gpipe")[zero]
    run(case("gpt", 4, "clip", 4, zero=zero, micro_batches=3, schedule=schedule, data=2,
             min_group_bytes=300))  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("task", ["gpt", "t5", "unet"])
@pytest.mark.parametrize("mode", MODES)
def test_all_beside_data_parallelism(zero, schedule, task, mode) -> None:
    run(case(task, 4, mode, 8, zero=zero, micro_batches=3, schedule=schedule, data=2))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("shm", {"data": 2, "zero": 3, "schedule": "zero-bubble"}),
        ("gloo", {"schedule": "interleaved"}),
        pytest.param("mpi", {}, marks=pytest.mark.mpi),
    ],
)
def test_processes(backend, options) -> None:
    wanted = case("gpt", 4 if "data" in options else 2, "clip", 3, micro_batches=4, **options)
    check(wanted, Team(backend, wanted.ranks).run(train_rank_of_pool, wanted))

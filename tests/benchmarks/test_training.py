"""The benchmarks of training run, on models so small that only mistakes show in them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shoal

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 50

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module", autouse=True)
def as_scripts() -> Iterator[None]:
    """They import each other as scripts do; ranks inherit the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def measured(as_scripts: None) -> dict[str, Any]:
    """What everything finds in one run of two processes: starting them takes longest."""

    def measure() -> dict[str, Any]:
        shape = import_module("gpt").Shape(2, 32, batch=2, length=8, heads=2)
        contest, scaling = import_module("training_contest"), import_module("scaling_contest")
        grouping = import_module("grouping")
        course = import_module("trainee").Course(shape)
        return {
            "compared": compare_with_one_step_more(course),
            "training": contest.hold(contest.Plan(course, contenders(), rounds=1)),
            "scaling": scaling.measure(scaling.Plan(shape, rounds=1)),
            "grouping": grouping.measure(grouping.Chain(layers=60, width=8, rows=2), 1),
        }

    return shoal.run(measure, 2, "shm", timeout=TIMEOUT_S)[0]


def compare_with_one_step_more(course: Any) -> dict[str, float]:
    """On a rank: what is told of contenders of which one trained longer."""
    contest, backend = import_module("training_contest"), shoal.world().backend
    venue = import_module("worlds").Venue(shm=backend, gloo=backend)
    make = import_module("shoal_trainees").ShoalTrainee
    trainees = {name: make(course, backend, name) for name in ("ddp", "zero1", "zero3")}
    for trainee in (*trainees.values(), trainees["zero3"]):
        trainee.step()
    return contest.compare(trainees, venue)


def contenders() -> tuple[str, ...]:
    roster = import_module("roster")
    return tuple(name for name in roster.ROSTER if not name.startswith(roster.DEEPSPEED))


def test_all_contenders_train_the_same_model(measured: dict[str, Any]) -> None:
    rows = measured["training"]
    assert [row["contender"] for row in rows] == list(contenders())
    for row in rows:
        assert row["has_learned"], row
        assert 0 < row["low_s"] <= row["median_s"] <= row["high_s"]
        is_common = row["contender"] not in ("alone", "independent")
        assert (row["difference"] is not None) == is_common
        assert not is_common or row["difference"] <= 1e-4, row
    text = io.StringIO()
    import_module("training_report").print_table(Console(file=text, width=200), rows)
    assert all(name in text.getvalue() for name in contenders())


def test_a_contender_that_trained_otherwise_is_noticed(measured: dict[str, Any]) -> None:
    compared = measured["compared"]
    assert compared["ddp"] == 0.0
    assert compared["zero1"] <= 1e-6
    assert compared["zero3"] > 5e-5  # AdamW's step is about lr, which is 1e-4


def test_memory_is_that_of_the_formula(measured: dict[str, Any]) -> None:
    report = import_module("scaling_report")
    rows = measured["scaling"]
    assert report.scaling_table("tiny", rows).row_count == len(rows) == 5
    for name, verdicts in report.judge_scaling(rows, num_cores=2):
        missed = [verdict.text for verdict in verdicts if not verdict.passed]
        assert not missed, name


def test_layers_are_grouped_and_not(measured: dict[str, Any]) -> None:
    grouping, report = import_module("grouping"), import_module("scaling_report")
    row = measured["grouping"]
    assert row["groups"] == {grouping.GROUPED: 1, grouping.UNGROUPED: 60}
    assert report.grouping_table(row).row_count == 3
    assert report.exposed_s(row, grouping.UNGROUPED) > report.exposed_s(row, grouping.GROUPED)
    ((_, verdicts),) = report.judge_grouping([row])
    assert len(verdicts) == 1


def row_of(contender: str, median_s: float, **more: Any) -> dict[str, Any]:
    row = {"shape": "40x64", "contender": contender, "median_s": median_s}
    return {**row, "has_learned": True, "difference": None, **more}


@pytest.mark.parametrize(("median_s", "passed"), [(0.19, True), (0.21, False)])
def test_a_target_is_met_or_missed(median_s: float, passed: bool) -> None:
    rows = [row_of("fully-shard-leaf", 1.0), row_of("shm-zero3", median_s)]
    judged = dict(import_module("training_targets").judge(rows))
    (verdict,) = judged["shm-zero3: at least 5 times faster than fully-shard-leaf"]
    assert verdict.passed is passed
    assert not judged["shm-zero3: at least 2 times faster than fully-shard-leaf"]  # not this shape


def test_contenders_that_differ_are_told() -> None:
    rows = [row_of("shm-ddp", 1.0, difference=2e-4), row_of("shm-fsdp", 1.0, difference=1e-6)]
    judged = dict(import_module("training_targets").judge(rows))
    verdicts = judged["contenders that communicate: parameters agree within 0.0001"]
    assert [verdict.passed for verdict in verdicts] == [False, True]


def test_contenders_are_chosen_by_pattern() -> None:
    roster = import_module("roster")
    assert roster.choose(["shm-z*", "alone"]) == ("alone", "shm-zero1", "shm-zero2", "shm-zero3")
    with pytest.raises(ValueError, match="'mpi-ddp' is none of alone, independent"):
        roster.choose(["mpi-ddp"])

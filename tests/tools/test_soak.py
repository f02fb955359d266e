"""The soak test finds what it looks for."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import leaks
import shoal

TOOLS = Path(__file__).parent.parent.parent / "tools"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("soak")
    shoal.run(lambda: None, ranks=2, backend="shm")  # the fork server stays for later tests
    leaks.baseline()
    return module


def test_equal_calls_are_no_mismatch_and_the_seed_is_told(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "CALLS", {"one": shoal.world, "other": shoal.world})
    monkeypatch.setattr(soak, "call_one", lambda *_: shoal.world().barrier())
    assert soak.play("mismatches", 7) == "WRONG"
    assert "--campaign mismatches --seed 7 --rounds 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("kills", "named by all"),
        ("saves", r"(zero\d|ddp) over \w+: (old|new)"),
        ("mismatches", "a mismatch on all ranks"),
    ],
)
def test_a_round(soak: ModuleType, name: str, ending: str) -> None:
    assert re.search(ending, soak.CAMPAIGNS[name](random.Random(3)))


@pytest.mark.parametrize(
    ("phase", "backend"),
    [
        ("forward", "gloo"), ("collective", "shm"), ("optimizer", "shm"), ("commit", "gloo"),
        ("save", "shm"), ("join", "gloo"), ("recovery", "shm"),
    ],
)  # fmt: skip
def test_a_loss_in_each_phase_is_survived(soak: ModuleType, phase: str, backend: str) -> None:
    faults = soak.elastic_faults.play(random.Random(f"{phase} 1"), phase, backend)
    assert faults[0].phase == phase


def test_other_values_at_the_end_are_noticed(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [({"w": torch.ones(2)}, {}, soak.elastic_faults.NUM_STEPS, [])] * 4
    other = [({"w": torch.tensor([1.0, 2.0])}, {}, soak.elastic_faults.NUM_STEPS, [])] * 4
    monkeypatch.setattr(soak.elastic_faults, "_EXPECTED", {})
    monkeypatch.setattr(
        soak.elastic_faults, "run", lambda *args: (other if args[3] else found, len(args[3]))
    )
    with pytest.raises(AssertionError, match="rank 0 has other values"):
        soak.elastic_faults.play(random.Random(1), "forward", "shm")


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.full)])
def test_training_keeps_its_values_while_ranks_are_lost_again_and_again(
    soak: ModuleType, backend: str
) -> None:
    """The short form of the timed soak: faults come after so many steps."""
    timed = importlib.import_module("timed_soak")
    plan = timed.Plan(backend, "zero3", timed.STEPS_PER_EPOCH, width=16, seed=5)
    expected, found = timed.measure(plan), timed.measure(plan._replace(every_steps=20))
    timed.compare(expected, found)
    assert [signal for signal, _ in found.faults] == ["SIGSTOP", "SIGABRT"]
    assert len(found.felt()) == len(found.faults)
    (_, _, num_committed), *_ = found.states
    assert num_committed == timed.STEPS_PER_EPOCH


def test_other_values_after_a_timed_soak_are_noticed(soak: ModuleType) -> None:
    timed = importlib.import_module("timed_soak")
    pace = timed.Pace([({"w": torch.ones(2)}, {}, 50)] * 4, [(1, 0.0), (2, 1.0), (3, 5.0)], [])
    other = pace._replace(states=[({"w": torch.zeros(2)}, {}, 50)] * 4, faults=[("SIGKILL", 1.5)])
    with pytest.raises(AssertionError, match="rank 0 has other values"):
        timed.compare(pace, other)
    with pytest.raises(AssertionError, match="ranks are missing"):
        timed.compare(pace, other._replace(states=pace.states[:3]))
    assert other.felt() == [1.5]

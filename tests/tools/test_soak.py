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

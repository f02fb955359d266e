"""The soak test finds what it looks for."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path
from types import ModuleType

import pytest

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

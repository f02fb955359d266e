"""The benchmark of elastic training runs, on a model so small that only mistakes show in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "elastic.py"

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_each_part_prints_its_table() -> None:
    """As a script: its name is that of a folder of tests."""
    words = [sys.executable, str(BENCHMARK), "--tiny", "--rounds", "1", "--ranks", "3"]
    done = subprocess.run(
        [*words, "--backends", "shm"], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    for way in ("fewer ranks", "a warm spare", "a cold restart"):
        assert re.search(rf"{way} +shm +median +\d+\.\d+ s", done.stdout)
    assert done.stdout.count("one copy of the") == 2  # for each strategy
    assert done.stdout.count("to the state over fewer ranks") == 2

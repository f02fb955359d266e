"""The README's script is real: plain before, distributed after, and equal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SHOAL = str(Path(sys.executable).with_name("shoal"))
TIMEOUT_S = 100


def script(without: str) -> str:
    """One side of the diff: what is not marked as being of the other."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != without)


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_the_script_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(script(without="+"))
    (tmp_path / "train.py").write_text(script(without="-"))
    assert "shoal" not in (tmp_path / "plain.py").read_text()
    run(tmp_path, sys.executable, "plain.py")
    assert (tmp_path / "model.pt").exists()
    run(tmp_path, SHOAL, "launch", "-n", "2", "train.py")
    assert (tmp_path / "run" / "LATEST").exists()
    shown = run(
        tmp_path, SHOAL, "verify", "train.py:build", "-n", "2", "--strategy", "zero3,tensor"
    )
    assert len(re.findall(r"│ (?:zero3|tensor) +│ yes ", shown)) == 2


def test_the_commands_are_the_makefiles() -> None:
    """What somebody types who has just cloned it."""
    targets = README.with_name("Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make (\S+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(commands)
    for target in commands:
        assert re.search(rf"^{target}:", targets, re.MULTILINE)

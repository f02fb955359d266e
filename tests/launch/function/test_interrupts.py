"""Ctrl-C in `shoal.run`: what the user sees of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from shoal.launch.function.interrupts import ending_quietly, without_own_frames

SCRIPT = """
import os, signal, shoal, time
def wait(caller):
    if shoal.world().rank == 0:
        os.kill(caller, signal.SIGINT)
    time.sleep(3)
shoal.run(wait, 2, "BACKEND", args=(os.getpid(),))
"""


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_the_users_line_is_all_that_is_shown(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("BACKEND", backend))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == -signal.SIGINT
    assert [line for line in done.stderr.splitlines() if not line.startswith("    ")] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 7, in <module>',
        "KeyboardInterrupt",
    ]


def interrupt_twice() -> None:
    with ending_quietly():
        try:
            raise KeyboardInterrupt
        finally:
            raise KeyboardInterrupt


def test_a_second_one_does_not_double_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt_twice()
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback") == 1


def test_all_frames_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt_twice()
    monkeypatch.setenv("SHOAL_TRACEBACK", "full")
    assert without_own_frames(caught.tb) is caught.tb
    assert len(traceback.extract_tb(caught.tb)) > 1

"""Scripts to launch, and launchers to watch from outside."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LAUNCHER = [sys.executable, "-c", "from shoal.cli import main; main()", "launch"]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script that imports nothing heavy, and returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text("import json, os, signal, subprocess, sys, time\n" + body)
        return str(path)

    return write


@pytest.fixture
def background() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launchers as processes of their own, and ends them with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*LAUNCHER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()

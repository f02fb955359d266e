"""Runs the tests in two halves at a time: much of what they do is to wait for processes.

Arguments go to pytest. With paths among them, just these are run, as pytest would.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
# About as long as all the others.
FIRST = ("checkpoint", "optim", "sharding", "strategies", "verification")


def halves() -> tuple[list[str], list[str]]:
    """Folders and files of tests."""
    everything = sorted(
        path for path in TESTS.iterdir() if path.is_dir() or path.name.startswith("test_")
    )
    everything = [path for path in everything if not path.name.startswith((".", "_"))]
    first = [str(path) for path in everything if path.name in FIRST]
    return first, [str(path) for path in everything if path.name not in FIRST]


def main(options: list[str]) -> int:
    """Returns pytest's exit code, that of the first half that failed."""
    command = [sys.executable, "-m", "pytest", *options]
    if any(Path(option.partition("::")[0]).exists() for option in options):
        return subprocess.call(command)
    first, second = halves()
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen([*command, *second], stdout=output, stderr=subprocess.STDOUT)
        try:
            code = subprocess.call([*command, *first])
            other = beside.wait()
        finally:
            beside.kill()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
    return code or other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

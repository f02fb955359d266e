"""Runs the tests in three parts at a time: much of what they do is to wait for processes.

Arguments go to pytest. With paths among them, just these are run, as pytest would.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
# Each takes about as long as the others; the last has all that is named nowhere here.
PARTS = (
    ("activations", "launch/elastic", "strategies", "test_examples.py"),
    ("checkpoint", "cli", "comm", "data", "meeting", "optim", "strategies/tensor", "verification"),
    (".",),
)


def arguments(part: tuple[str, ...]) -> list[str]:
    """The folders of a part, without those inside of them that another part names."""
    elsewhere = {name for other in PARTS for name in other}.difference(part, ["."])
    ignored = [f"--ignore={TESTS / name}" for name in sorted(elsewhere)]
    return [*(str(TESTS / name) for name in part), *ignored]


def main(options: list[str]) -> int:
    """Returns pytest's exit code, that of a part that failed if one did."""
    command = [sys.executable, "-m", "pytest", *options]
    if any(Path(option.partition("::")[0]).exists() for option in options):
        return subprocess.call(command)
    with contextlib.ExitStack() as files:
        later = [files.enter_context(tempfile.TemporaryFile()) for _ in PARTS[1:]]
        running = [
            subprocess.Popen([*command, *arguments(part)], stdout=output, stderr=output)
            for part, output in zip(PARTS, (None, *later), strict=True)
        ]
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        for output in later:
            output.seek(0)
            sys.stdout.buffer.write(output.read())
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

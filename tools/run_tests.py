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
# All that is named nowhere here takes about as long as each of them.
PARTS = (("strategies",), ("checkpoint", "comm", "optim", "verification"))


def parts() -> list[list[str]]:
    """Folders and files of tests."""
    everything = sorted(
        path for path in TESTS.iterdir() if path.is_dir() or path.name.startswith("test_")
    )
    everything = [path for path in everything if not path.name.startswith((".", "_"))]
    rest = {path.name for path in everything}.difference(*PARTS)
    return [[str(path) for path in everything if path.name in part] for part in (*PARTS, rest)]


def main(options: list[str]) -> int:
    """Returns pytest's exit code, that of a part that failed if one did."""
    command = [sys.executable, "-m", "pytest", *options]
    if any(Path(option.partition("::")[0]).exists() for option in options):
        return subprocess.call(command)
    with contextlib.ExitStack() as files:
        later = [files.enter_context(tempfile.TemporaryFile()) for _ in PARTS]
        running = [
            subprocess.Popen([*command, *part], stdout=output, stderr=output)
            for part, output in zip(parts(), (None, *later), strict=True)
        ]
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        for output in later:
            output.seek(0)
            sys.stdout.buffer.write(output.read())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

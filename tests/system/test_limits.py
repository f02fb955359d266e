"""Errors at limits say which one, how high it is, and how to raise it."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest

from shoal.system.limits import advice, explained

RUN = "import shoal, shoal.api; shoal.run(lambda: None, ranks=12, backend='shm', timeout=30)"
LAUNCH = "from shoal.cli import main; main()"


def test_advice_names_the_limit_and_the_remedy() -> None:
    text = advice(OSError(errno.EMFILE, "Too many open files"))
    assert text is not None
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in text
    assert "ulimit -n" in text
    assert advice(OSError(errno.ENOENT, "")) is None
    assert advice(ValueError("")) is None


def test_the_advice_is_added_once() -> None:
    with pytest.raises(OSError, match="large") as caught, explained(), explained():
        raise OSError(errno.EFBIG, "File too large")
    assert len(caught.value.__notes__) == 1
    assert "ulimit -f unlimited" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("limit", "remedy", "program"),
    [
        ("-n 20", "ulimit -n", [RUN]),
        ("-f 100", "ulimit -f", [RUN]),
        ("-n 20", "ulimit -n", [LAUNCH, "launch", "-n", "8", "-m", "this"]),
    ],
)
def test_a_program_at_its_limit(limit: str, remedy: str, program: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", sys.executable, "-c", *program],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert remedy in done.stderr, done.stderr

"""What every fault test needs: a running forkserver, and gates that hold a rank back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leaks
import pools
from faults.gate import Gate
from shoal.launch.function.forkserver.forkserver import fork_server


@pytest.fixture(autouse=True)
def forkserver_is_up() -> None:
    """It serves all tests, so it is no leak of the first one; other tests' pools are gone."""
    pools.close_all()
    fork_server()
    leaks.baseline()


@pytest.fixture
def new_gate(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """Makes gates; the test holds them, so that what passes through is never lost."""
    held: list[int] = []
    numbers = itertools.count()

    def make() -> Gate:
        gate = Gate(str(tmp_path / f"gate-{next(numbers)}"))
        held.append(gate.make())
        return gate

    yield make
    for fd in held:
        os.close(fd)


@pytest.fixture
def gate(new_gate: Callable[[], Gate]) -> Gate:
    """One gate."""
    return new_gate()

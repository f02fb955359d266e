"""The caller is interrupted: its ranks end with it, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import shoal
from faults.gate import Gate
from faults.worlds import memfds_of_shoal, still_running, world
from shoal.errors import PeerError


def interrupt_the_caller(caller: int, pids_to: str, gate: Gate) -> None:
    world = shoal.world()
    Path(pids_to, f"rank-{world.rank}").write_text(str(os.getpid()))
    world.barrier()
    if world.rank == 0:
        os.kill(caller, signal.SIGINT)
    gate.wait()  # which nobody opens


@pytest.mark.parametrize(
    ("backend", "ranks"), [world("shm", 3), world("gloo", 2), world("mpi", 2, full=True)]
)
def test_processes_are_killed_and_reaped(
    backend: str, ranks: int, tmp_path: Path, gate: Gate
) -> None:
    with pytest.raises(KeyboardInterrupt):
        shoal.run(interrupt_the_caller, ranks, backend, (os.getpid(), str(tmp_path), gate))
    pids = [path.read_text() for path in tmp_path.glob("rank-*")]
    assert len(pids) == ranks
    assert still_running(pids) == []
    assert memfds_of_shoal() == []


def interrupt_in_memory(told: list[tuple[int, bool]]) -> None:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        signal.raise_signal(signal.SIGINT)
    try:
        while True:
            world.barrier()
    except PeerError as error:
        told.append((world.rank, "KeyboardInterrupt" in error.reason))
        raise


class Shared(list):  # type: ignore[type-arg]
    """A list that ranks in memory share with the test, since it refuses to be copied."""

    def __reduce__(self) -> str:
        raise TypeError("not to be copied")


def test_threads_end_at_their_next_operation() -> None:
    told = Shared()
    with pytest.raises(KeyboardInterrupt):
        shoal.run(interrupt_in_memory, 3, "memory", (told,))
    assert sorted(told) == [(0, True), (1, True), (2, True)]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("shoal-rank")]

"""A process is stopped (SIGSTOP, a debugger): an error soon, but not for a moment's stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import torch

import shoal
from faults.gate import Gate
from faults.worlds import (
    MOST_PROCESSES,
    SOON_S,
    all_pids,
    assert_blames,
    memfds_of_shoal,
    outcomes,
    timed,
    values,
    world,
)
from shoal.errors import PeerError
from shoal.launch.function.outcome import Outcome


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2].startswith("T")


def end_once_all_noticed(victim: int, gate: Gate, number: int = signal.SIGKILL) -> None:
    """The last to see the stop is rank 0, which ends it."""
    world = shoal.world()
    if world.rank > 1:
        gate.open()
    if world.rank == 0:
        for _ in range(world.size - 2):
            gate.wait()
        with contextlib.suppress(ProcessLookupError):  # its launcher may be first
            os.kill(victim, number)


def stop_between(num_elements: int, gate: Gate, *, revive: bool) -> None:
    world = shoal.world()
    victim = all_pids()[1]
    if world.rank == 1:
        os.kill(victim, signal.SIGSTOP)
    try:
        with timed():
            world.all_reduce(torch.ones(num_elements))
    except PeerError:
        end_once_all_noticed(victim, gate, signal.SIGCONT if revive else signal.SIGKILL)
        raise


def assert_noticed(results: list[Outcome]) -> None:
    for outcome in results:
        if outcome.rank != 1:
            assert_blames(outcome, 1, "stopped")
            assert outcome.error.seconds < SOON_S


@pytest.mark.parametrize(("backend", "ranks"), MOST_PROCESSES)
def test_before_an_operation(backend: str, ranks: int, gate: Gate) -> None:
    results = outcomes(lambda: stop_between(3, gate, revive=False), backend=backend, ranks=ranks)
    assert_noticed(results)


@pytest.mark.parametrize(
    ("backend", "ranks"), [world("shm", 2), world("gloo", 3, full=True), world("mpi", 2, full=True)]
)
def test_one_that_goes_on_too_late_is_told(backend: str, ranks: int, gate: Gate) -> None:
    """The others have given up, so there is nobody left to work with."""
    run = lambda: stop_between(1 << 20, gate, revive=True)  # noqa: E731
    results = outcomes(run, backend=backend, ranks=ranks)
    assert_noticed(results)
    assert isinstance(results[1].error, PeerError), results[1].traceback


def stop_during(gate: Gate) -> None:
    world = shoal.world()
    victim = all_pids()[1]
    data = torch.ones(1 << 20)
    begun = threading.Event()

    def shoot() -> None:
        begun.wait()
        os.kill(victim, signal.SIGSTOP)

    shooter = threading.Thread(target=shoot, daemon=True)
    if world.rank == 0:
        shooter.start()
    try:
        for number in range(1_000_000):
            if number == 3:
                begun.set()
            begin = time.monotonic()
            world.all_reduce(data)
    except PeerError as error:
        error.seconds = time.monotonic() - begin  # type: ignore[attr-defined]
        end_once_all_noticed(victim, gate)
        raise


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [world("shm", 2), world("shm", 3, full=True), world("gloo", 2), world("mpi", 2)],
)
def test_during_an_operation(backend: str, ranks: int, gate: Gate) -> None:
    assert_noticed(outcomes(stop_during, gate, backend=backend, ranks=ranks))


def stop_for_a_moment(seconds: float, pauses: int) -> float:
    """Rank 0 stops rank 1 and lets it go on, again and again; what it stops is a wait."""
    world = shoal.world()
    victim = all_pids()[1]
    total = 0.0
    for _ in range(pauses):
        if world.rank == 0:
            os.kill(victim, signal.SIGSTOP)
            timer = threading.Timer(seconds, os.kill, (victim, signal.SIGCONT))
            timer.start()
        total += world.all_reduce(torch.ones(2))[0].item()
        if world.rank == 0:
            timer.join()
    return total


@pytest.mark.parametrize(("backend", "ranks"), MOST_PROCESSES)
def test_for_a_moment_is_no_error(backend: str, ranks: int) -> None:
    results = outcomes(stop_for_a_moment, 0.1, 6, backend=backend, ranks=ranks)
    assert values(results) == [6.0 * ranks] * ranks


def stop_for_good() -> None:
    world = shoal.world()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.barrier()


def test_a_stopped_process_is_not_left_behind() -> None:
    """Nobody wakes it: the caller kills it, and does not wait for the grace."""
    results = outcomes(stop_for_good, backend="shm", ranks=2)
    assert_blames(results[0], 1, "stopped")
    assert results[1].exit_code == -signal.SIGKILL
    assert "was stopped (SIGSTOP), and killed for that" in results[1].fate
    assert memfds_of_shoal() == []

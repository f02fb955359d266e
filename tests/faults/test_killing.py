"""A process is killed with -9: the others name it, and nothing of it stays behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import shoal
from faults.gate import Gate
from faults.worlds import (
    MOST_PROCESSES,
    PROCESSES,
    SOON_S,
    all_pids,
    assert_all_blame,
    kill,
    memfds_of_shoal,
    outcomes,
    still_running,
    timed,
    world,
)


def die_between(victim: int) -> None:
    world = shoal.world()
    world.all_reduce(torch.ones(3))
    world.barrier()
    if world.rank == victim:
        kill(os.getpid())
    with timed():
        world.all_reduce(torch.ones(3))


def assert_noticed(results: list, victim: int) -> None:
    assert results[victim].error is None
    assert results[victim].exit_code in (-9, None)  # mpiexec keeps the code to itself
    assert results[victim].failed
    assert_all_blame(results, victim, "died")
    assert all(o.error.seconds < SOON_S for o in results if o.rank != victim)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("backend", "ranks"), MOST_PROCESSES)
def test_between_operations(backend: str, ranks: int, victim: int) -> None:
    assert_noticed(outcomes(die_between, victim, backend=backend, ranks=ranks), victim)


def die_first() -> None:
    world = shoal.world()
    if world.rank == 1:
        kill(os.getpid())
    with timed():
        world.barrier()


@pytest.mark.parametrize(("backend", "ranks"), MOST_PROCESSES)
def test_before_the_first_operation(backend: str, ranks: int) -> None:
    assert_noticed(outcomes(die_first, backend=backend, ranks=ranks), 1)


def die_in_a_transfer(num_bytes: int, gate: Gate) -> None:
    world = shoal.world()
    victim = all_pids()[1]
    data = torch.ones(num_bytes // 4)
    begun = threading.Event()

    def shoot() -> None:
        begun.wait()
        kill(victim)

    shooter = threading.Thread(target=shoot, daemon=True)
    if world.rank == 0:
        shooter.start()
    with timed():
        for number in range(10_000):
            if number == 3:
                begun.set()
            world.all_reduce(data)


@pytest.mark.parametrize(
    ("backend", "ranks", "num_bytes"),
    [
        pytest.param("shm", 2, 64 << 20, id="shm-2-64M"),
        pytest.param("shm", 3, 8 << 20, id="shm-3-8M"),
        pytest.param("shm", 2, 64, id="shm-2-64"),
        pytest.param("gloo", 2, 64 << 20, id="gloo-2-64M"),
        pytest.param("gloo", 3, 8 << 20, id="gloo-3-8M", marks=pytest.mark.full),
        pytest.param("mpi", 2, 64 << 20, id="mpi-2-64M", marks=pytest.mark.mpi),
        pytest.param("mpi", 3, 8 << 20, id="mpi-3-8M", marks=[pytest.mark.mpi, pytest.mark.full]),
    ],
)
def test_during_a_transfer(backend: str, ranks: int, num_bytes: int, gate: Gate) -> None:
    results = outcomes(die_in_a_transfer, num_bytes, gate, backend=backend, ranks=ranks)
    assert results[1].error is None
    assert_all_blame(results, 1, "died")


def die_in_a_message() -> None:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        threading.Thread(target=kill, args=(os.getpid(),), daemon=True).start()
    with timed():
        for _ in range(10_000):
            if world.rank == 0:
                world.send(torch.ones(1 << 18), dst=1)
            elif world.rank == 1:
                world.recv(src=0)
            else:
                world.barrier()


@pytest.mark.parametrize(
    ("backend", "ranks"), [world("shm", 3), world("gloo", 3), world("mpi", 3, full=True)]
)
def test_during_a_message(backend: str, ranks: int) -> None:
    results = outcomes(die_in_a_message, backend=backend, ranks=ranks)
    assert_all_blame(results, 1, "died")


def die_with_mapped_memory() -> None:
    world = shoal.world()
    mine = world.backend.empty(4 << 20)
    mine.fill_(1.0)
    world.all_reduce(mine)
    world.barrier()
    if world.rank == 1:
        kill(os.getpid())
    with timed():
        world.all_reduce(mine)


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("shm", 4)])
def test_memory_of_a_dead_rank_is_let_go(backend: str, ranks: int) -> None:
    assert_noticed(outcomes(die_with_mapped_memory, backend=backend, ranks=ranks), 1)
    assert memfds_of_shoal() == []


def die_together(pids_to: str) -> None:
    world = shoal.world()
    world.backend.empty(1 << 20)
    world.all_reduce(torch.ones(1 << 20))
    Path(pids_to, str(world.rank)).write_text(str(os.getpid()))
    world.barrier()
    kill(os.getpid())


@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_all_at_once_leaves_nothing(backend: str, ranks: int, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    results = outcomes(die_together, str(tmp_path), backend=backend, ranks=ranks)
    # A rank may still learn of the others' death before its own turn to die.
    assert all(outcome.failed for outcome in results)
    pids = [path.read_text() for path in tmp_path.iterdir()]
    assert len(pids) == ranks
    assert still_running(pids) == []
    assert {name for name in os.listdir("/dev/shm") if "shoal" in name} <= before
    assert memfds_of_shoal() == []


def die_with_a_result_under_way() -> int:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        os._exit(7)
    with timed():
        world.barrier()
    return 0


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 3)])
def test_os_exit_is_a_death(backend: str, ranks: int) -> None:
    results = outcomes(die_with_a_result_under_way, backend=backend, ranks=ranks)
    assert results[1].exit_code == 7
    assert_all_blame(results, 1, "died")


def test_the_caller_is_told_of_a_killed_rank() -> None:
    with pytest.raises(shoal.errors.PeerError, match="killed by signal 9") as caught:
        shoal.run(die_between, 2, "shm", (1,))
    assert caught.value.rank == 1

"""Fetches of activations from ranks that died, left, are stopped or closed to strangers."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import shoal
from comm.test_forked_children import in_child
from faults.worlds import (
    MOST_PROCESSES,
    PROCESSES,
    SOON_S,
    TIMEOUT_S,
    all_pids,
    kill,
    outcomes,
    outcomes_between_hosts,
    timed,
    values,
    warnings_of_shoal,
)
from shoal.activations import DistributedCheckpointManager
from shoal.errors import DeadlineError, PeerError
from shoal.meeting import address as places


def fetch_from_the_dead(with_recompute: bool) -> object:
    world = shoal.world()
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", torch.full((2,), float(world.rank)))
    world.barrier()
    manager.retrieve_or_fetch("x", 1)
    world.barrier()
    if world.rank == 1:
        kill(os.getpid())
    recompute = (lambda: torch.zeros(2)) if with_recompute else None
    with timed():
        while True:  # until it is dead
            found = manager.retrieve_or_fetch("x", 1, recompute=recompute)
            if not found.any():
                manager.close()
                return found.tolist()


@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_a_holder_that_died(backend: str, ranks: int) -> None:
    results = outcomes(fetch_from_the_dead, False, backend=backend, ranks=ranks)
    for outcome in results:
        if outcome.rank != 1:
            assert isinstance(outcome.error, PeerError), outcome.traceback
            assert outcome.error.rank == 1
            assert outcome.error.seconds < SOON_S


@pytest.mark.parametrize(("backend", "ranks"), MOST_PROCESSES)
def test_a_holder_that_died_is_recomputed(backend: str, ranks: int) -> None:
    results = outcomes(fetch_from_the_dead, True, backend=backend, ranks=ranks)
    for outcome in results:
        assert outcome.rank == 1 or outcome.value == [0.0, 0.0], outcome.traceback


def fetch_from_the_stopped() -> object:
    world = shoal.world()
    pids = all_pids()
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", torch.zeros(1 << 22))
    world.barrier()
    if world.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with timed():
                manager.retrieve_or_fetch("x", 1)
        except PeerError as error:
            found = manager.retrieve_or_fetch("x", 1, recompute=lambda: torch.ones(1))
            return error.rank, error.reason, error.seconds, found.item()
        finally:
            os.kill(pids[1], signal.SIGCONT)
            world.barrier()
            manager.close()
    world.barrier()
    manager.close()
    return None


# A third rank would be told of the stop while it waits for the two others.
@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_a_holder_that_is_stopped(backend: str) -> None:
    results = outcomes(fetch_from_the_stopped, backend=backend, ranks=2)
    rank, reason, seconds, found = values(results)[0]
    assert rank == 1
    assert "is stopped" in reason
    assert seconds < SOON_S
    assert found == 1.0


def fetch_from_who_left() -> object:
    world = shoal.world()
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", torch.zeros(2))
    world.barrier()
    if world.rank == 1:
        world.shutdown()
        return None
    try:
        while True:
            manager.retrieve_or_fetch("x", 1)
    except PeerError as error:
        return error.rank, error.reason
    finally:
        manager.close()


@pytest.mark.parametrize(
    "backend", ["memory", "shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)]
)
def test_a_holder_that_left(backend: str) -> None:
    if backend == "memory":  # ranks take turns there: rank 0 would keep its own
        found = values(outcomes(fetch_after_turn, backend=backend, ranks=2))[0]
    else:
        found = values(outcomes(fetch_from_who_left, backend=backend, ranks=2))[0]
    assert found[0] == 1
    assert "left" in found[1] or "ended" in found[1]


def fetch_after_turn() -> object:
    world = shoal.world()
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", torch.zeros(2))
    if world.rank == 1:
        world.shutdown()
        return None
    with contextlib.suppress(PeerError):
        world.barrier()
    with pytest.raises(PeerError) as caught:
        manager.retrieve_or_fetch("x", 1)
    assert manager.retrieve_or_fetch("x", 1, recompute=lambda: torch.ones(1)).item() == 1
    return caught.value.rank, caught.value.reason


def fetch_from_a_slow_one() -> object:
    """The holder's thread does not get to answer; the asker's deadline is its own."""
    world = shoal.world()
    manager = DistributedCheckpointManager(timeout=0.5)
    manager.register_checkpoint("x", torch.full((1,), float(world.rank)))
    lock = manager.local_manager._lock
    if world.rank == 1:
        holding, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                holding.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        holding.wait()
    world.barrier()
    said: object = None
    if world.rank == 0:
        begin = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            manager.retrieve_or_fetch("x", 1)
        seconds = time.monotonic() - begin
        manager._timeout = TIMEOUT_S
        other = manager.retrieve_or_fetch("x", 2).item()  # a slow one delays only who asks it
        said = str(caught.value), seconds, other
    world.barrier()
    if world.rank == 1:
        done.set()
        thread.join()
    world.barrier()
    if world.rank == 0:
        said = (*said, manager.retrieve_or_fetch("x", 1).item())
    world.barrier()
    manager.close()
    return said


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_a_slow_holder(backend: str) -> None:
    text, seconds, other, later = values(outcomes(fetch_from_a_slow_one, backend=backend, ranks=3))[
        0
    ]
    assert "rank 0 fetches 'x' from rank 1" in text
    assert "The deadline has passed" in text
    assert 0.5 <= seconds < SOON_S
    assert other == 2.0
    assert later == 1.0


@contextlib.contextmanager
def unable_to_answer(manager: DistributedCheckpointManager) -> Iterator[None]:
    """Inside, the thread that serves what this rank lends does not get to answer."""
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with manager.local_manager._lock:
            holding.set()
            done.wait(TIMEOUT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def fetch_while_computing() -> object:
    """The holder answers only after the asker went on, so `prefetch` cannot have waited for it."""
    world = shoal.world()
    with DistributedCheckpointManager() as manager:
        manager.register_checkpoint("x", torch.full((2,), float(world.rank)))
        found = None
        if world.rank == 0:
            world.barrier()
            manager.prefetch("x", 1)
            world.send(torch.ones(1), 1)
            found = manager.retrieve_or_fetch("x", 1).tolist()
        else:
            with unable_to_answer(manager) if world.rank == 1 else contextlib.nullcontext():
                world.barrier()
                if world.rank == 1:
                    world.recv(src=0)
        world.barrier()
    return found


@pytest.mark.parametrize(("backend", "ranks"), MOST_PROCESSES)
def test_a_fetch_is_under_way_while_the_asker_goes_on(backend: str, ranks: int) -> None:
    assert values(outcomes(fetch_while_computing, backend=backend, ranks=ranks))[0] == [1.0, 1.0]


def fetch_beside_one_who_waits() -> object:
    """Rank 0 waits for rank 1, which cannot answer until rank 2 has got what it wants."""
    world = shoal.world()
    with DistributedCheckpointManager() as manager:
        manager.register_checkpoint("x", torch.full((2,), float(world.rank)))
        found: object = None
        if world.rank == 0:
            world.barrier()
            found = manager.retrieve_or_fetch("x", 1).tolist()
        elif world.rank == 1:
            with unable_to_answer(manager):
                world.barrier()
                world.recv(src=2)
        else:
            world.barrier()
            found = [manager.retrieve_or_fetch("x", 0).tolist() for _ in range(3)]
            world.send(torch.ones(1), 1)
        world.barrier()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_a_slow_holder_delays_only_who_asks(backend: str) -> None:
    found = values(outcomes(fetch_beside_one_who_waits, backend=backend, ranks=3))
    assert found == [[1.0, 1.0], None, [[0.0, 0.0]] * 3]


def fetch_in_a_child() -> str:
    world = shoal.world()
    with DistributedCheckpointManager() as manager:
        manager.register_checkpoint("x", torch.full((2,), float(world.rank)))
        world.barrier()
        manager.retrieve_or_fetch("x", 1 - world.rank)
        said = in_child(lambda: manager.retrieve_or_fetch("x", 1 - world.rank))
        manager.retrieve_or_fetch("x", 1 - world.rank)
        world.barrier()
    return said


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_forked_child_does_not_fetch(backend: str) -> None:
    for text in values(outcomes(fetch_in_a_child, backend=backend, ranks=2)):
        assert "ClosedError: process " in text
        assert "was forked from rank" in text


def die_and_leave_a_child() -> object:
    """The child has the sockets of its rank; the others must not wait for it."""
    world, pids = shoal.world(), all_pids()
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", torch.ones(2))
    world.barrier()
    if world.rank == 1:
        if os.fork() == 0:
            asker = os.pidfd_open(pids[0])
            select.select([asker], [], [], 30)  # it lives as long as the one that asks
            os._exit(0)
        kill(os.getpid())
    with timed():
        while True:
            manager.retrieve_or_fetch("x", 1)


def test_a_child_of_a_dead_holder_does_not_serve() -> None:
    results = outcomes(die_and_leave_a_child, backend="shm", ranks=2)
    assert isinstance(results[0].error, PeerError), results[0].traceback
    assert results[0].error.seconds < SOON_S


def fetch_between_hosts() -> list[float]:
    world = shoal.world()
    with DistributedCheckpointManager() as manager:
        manager.register_checkpoint("x", torch.full((1 << 20,), float(world.rank)))
        world.barrier()
        found = [manager.retrieve_or_fetch("x", rank).mean().item() for rank in range(world.size)]
        assert places.host_and_port(world.backend._state.tensor_server.address)
        world.barrier()
    return found


def test_between_hosts() -> None:
    assert values(outcomes_between_hosts(fetch_between_hosts, ranks=3)) == [[0.0, 1.0, 2.0]] * 3


def strangers() -> object:
    """Those who know the address and nothing else, over TCP and over a unix socket."""
    world = shoal.world()
    with DistributedCheckpointManager() as manager, warnings_of_shoal() as said:
        manager.register_checkpoint("x", torch.ones(1))
        address = world.backend._state.tensor_server.address
        ends = []
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200, b"shoal\0\0\1" + b"\0" * 40):
            with places.connect_to(address, 5.0) as sock:
                sock.sendall(greeting)
                ends.append(_hears_nothing(sock))
        silent = places.connect_to(address, 5.0)  # delays nobody
        world.barrier()
        found = manager.retrieve_or_fetch("x", 1 - world.rank).item()
        world.barrier()
        silent.close()
    return ends, found, [text for text in said if "dropped a connection" in text]


def _hears_nothing(sock: socket.socket) -> bool:
    """It may be given a random number and a proof, which are worth nothing to it; no tensor."""
    heard = b""
    try:
        while len(heard) <= 64 and (piece := sock.recv(4096)):
            heard += piece
            sock.sendall(b"\0" * 32)
    except OSError:
        pass
    return len(heard) <= 64


@pytest.mark.parametrize("between_hosts", [False, True])
def test_strangers(between_hosts: bool) -> None:
    if between_hosts:
        results = values(outcomes_between_hosts(strangers, ranks=2))
    else:
        results = values(outcomes(strangers, backend="shm", ranks=2))
    for ends, found, warnings in results:
        assert ends == [True, True]
        assert found == 1.0
        assert len(warnings) == 1


def end_without_closing() -> list[str]:
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", torch.ones(1))
    world = shoal.world()
    world.barrier()
    manager.retrieve_or_fetch("x", 1 - world.rank)
    world.barrier()
    world.shutdown()
    manager.close()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal-t")]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_thread_ends_with_the_world(backend: str) -> None:
    assert values(outcomes(end_without_closing, backend=backend, ranks=2)) == [[], []]

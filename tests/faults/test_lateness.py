"""A rank that is alive but late: a warning names it, and at the deadline an error does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from faults.gate import Gate
from faults.worlds import (
    ALL,
    MOST,
    SOON_S,
    outcomes,
    site_of,
    timed,
    values,
    warnings_of_shoal,
    world,
)
from shoal.comm.control.deadlock import watch
from shoal.comm.world import World
from shoal.errors import DeadlineError, PeerError, ShoalError
from shoal.system import deadline

TIMEOUT_S = 1.5


def be_late(gate: Gate) -> None:
    world = shoal.world()
    for _ in range(num_before(world.size)):
        world.all_gather_object(world.rank)  # the last that all take part in
    limit_waits(world)
    if world.rank == 1:
        gate.wait()  # computes for ever so long
    try:
        with timed(), warnings_of_shoal() as messages:
            world.all_reduce(torch.ones(3))  # where the others wait
    except ShoalError as error:
        error.warnings = messages  # type: ignore[attr-defined]
        if world.rank == 0:
            world.fail(error)  # as its end would
            gate.open()
        raise


def limit_waits(world: World) -> None:
    """Not before: joining and the first operations may take their time."""
    world.backend._state.timeout = TIMEOUT_S


def num_before(ranks: int) -> int:
    """So many operations that rank 1 is the last to run, where ranks take turns."""
    return 2 if ranks == 2 else 1


@pytest.mark.parametrize(("backend", "ranks"), ALL)
def test_the_late_rank_is_named_before_and_at_the_deadline(
    backend: str, ranks: int, gate: Gate
) -> None:
    timeout = TIMEOUT_S if backend == "memory" else 30.0
    results = outcomes(be_late, gate, backend=backend, ranks=ranks, timeout=timeout)
    errors = [outcome.error for outcome in results]
    first = next(error for error in errors if isinstance(error, DeadlineError))
    assert TIMEOUT_S <= first.seconds < TIMEOUT_S + SOON_S
    last = site_of(be_late, "world.all_gather_object")
    here = site_of(be_late, "world.all_reduce")
    number = num_before(ranks) + 1
    assert_names_the_late_rank(str(first), here, number)
    assert last in str(first)
    # Where ranks take turns, one that has yet to get there waits for its turn, and warns as well.
    there = [warning for warning in first.warnings if here in warning]
    assert there, "no warning before the deadline"
    assert_names_the_late_rank(there[0], here, number)
    assert isinstance(results[1].error, PeerError), results[1].traceback
    for error in errors:
        # Whoever waits as well reaches the same deadline, or hears of the first to reach it.
        assert isinstance(error, DeadlineError | PeerError), results
        assert "missing: rank 1" in str(error)


def assert_names_the_late_rank(message: str, here: str, number: int) -> None:
    """Operation, number, group, how long, who is there, who is not, and where that one is."""
    assert "all_reduce(float32[3], op=sum)" in message
    assert f"#{number}" in message
    assert "world" in message or "ranks [0, 1" in message
    assert here in message
    assert re.search(r"\d\.\d s", message)
    assert re.search(r"arrived: (ranks? )?\[?[02]", message)
    assert "missing: rank 1" in message


def give_up(gates: list[Gate]) -> list[float]:
    gave_up, was_late = gates
    world = shoal.world()
    mine = torch.full((3,), float(world.rank))
    for _ in range(num_before(world.size)):
        world.barrier()
    if world.rank == 1:
        gave_up.wait()
        try:
            world.all_reduce(mine)
        finally:
            was_late.open()
    with pytest.raises(DeadlineError):
        world.all_reduce(mine)
    gave_up.open()
    was_late.wait()
    return mine.tolist()


def test_whoever_gave_up_takes_no_part(new_gate: Callable[[], Gate]) -> None:
    """In memory the last to come does the work for all, but not on tensors of those who left."""
    gates = [new_gate(), new_gate()]
    results = outcomes(give_up, gates, backend="memory", ranks=2, timeout=0.5)
    assert results[0].value == [0.0, 0.0, 0.0]
    assert isinstance(results[1].error, PeerError | DeadlineError), results[1].traceback


def wait_for_a_late_sender(gate: Gate) -> None:
    world = shoal.world()
    for _ in range(num_before(world.size)):
        world.barrier()
    limit_waits(world)
    if world.rank == 0:
        try:
            world.recv(src=1, tag=5)
        finally:
            gate.open()
    if world.rank == 1:
        gate.wait()


@pytest.mark.parametrize(("backend", "ranks"), MOST)
def test_a_late_message_has_the_deadline_too(backend: str, ranks: int, gate: Gate) -> None:
    timeout = TIMEOUT_S if backend == "memory" else 30.0
    run = wait_for_a_late_sender
    results = outcomes(run, gate, backend=backend, ranks=ranks, timeout=timeout)
    assert isinstance(results[0].error, DeadlineError), results[0].traceback
    assert "recv(anything, src=1, tag=5)" in str(results[0].error)
    assert "missing: rank 1" in str(results[0].error)


def be_late_but_in_time(gate: Gate) -> float:
    world = shoal.world()
    deadline._FIRST_WARNING_S = 0.5
    world.barrier()
    if world.rank == 1:
        gate.wait()
        return world.all_reduce(torch.ones(1)).item()

    with warnings_of_shoal() as messages:
        work = world.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(DeadlineError, match="still under way"):
            work.wait(timeout=0.2)
        while not messages:
            with pytest.raises(DeadlineError):
                work.wait(timeout=0.2)
        gate.open()
        return work.wait().item()


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 2)])
def test_a_wait_may_end_early_and_be_taken_up_again(backend: str, ranks: int, gate: Gate) -> None:
    """The deadline of one `wait` is not that of the operation, which goes on."""
    results = outcomes(be_late_but_in_time, gate, backend=backend, ranks=ranks)
    assert values(results) == [2.0, 2.0]


def compute_for_ever(gate: Gate) -> None:
    world = shoal.world()
    world.barrier()  # the last
    if world.rank == 1:
        gate.wait()
    world.barrier()


def test_threads_that_never_end_are_given_up(gate: Gate) -> None:
    """In memory the caller cannot kill a rank; it says so instead of waiting for ever."""
    with pytest.raises(DeadlineError, match="rank 1 did not end") as caught:
        outcomes(compute_for_ever, gate, backend="memory", ranks=2, timeout=0.5)
    assert "gate.py" in str(caught.value), "where it is"
    assert site_of(compute_for_ever, "# the last") in str(caught.value)
    gate.open()


def meet_in_the_wrong_order() -> None:
    world = shoal.world()
    world.barrier()
    limit_waits(world)
    watch.LONG_S = TIMEOUT_S + SOON_S  # else the deadlock may be known before the deadline
    world.send(torch.ones(1), dst=1 - world.rank)
    world.recv(src=1 - world.rank)


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 2, full=True)])
def test_a_deadlock_of_processes_ends_at_the_deadline(backend: str, ranks: int) -> None:
    results = outcomes(meet_in_the_wrong_order, backend=backend, ranks=ranks)
    errors = [outcome.error for outcome in results]
    assert any(isinstance(error, DeadlineError) for error in errors)
    assert all(isinstance(error, DeadlineError | PeerError) for error in errors)
    text = str(next(error for error in errors if isinstance(error, DeadlineError)))
    assert "was last in send(float32[1], dst=" in text


def read_late(kind: str, length: int, place: str, gates: list[Gate]) -> str | list[float]:
    """Rank 1 has shown that it is there, and reads only when rank 0 has given up on it."""
    backend: Any = shoal.world().backend
    backend._state.timeout = TIMEOUT_S if backend.rank == 0 else 30.0
    tensor = torch.empty(length) if place == "plain" else backend.empty(length)
    tensor.fill_(float(backend.rank))
    hold_back_the_move(backend, gates[0])
    try:
        return list(getattr(backend, kind)(tensor).unique().tolist())
    except ShoalError as error:
        return type(error).__name__
    finally:
        tensor.fill_(99.0)  # as memory is that was let go of
        gates[backend.rank].open()
        if backend.rank == 0:
            gates[1].wait()


def hold_back_the_move(backend: Any, gate: Gate) -> None:
    """On rank 1, everything that the transport does once the ranks have agreed."""
    waits = iter([gate.wait])

    def wait_and_move(*args: Any) -> None:
        next(waits, lambda: None)()
        move(*args)

    move = backend._coordination.transport
    if backend.rank == 1:
        backend._coordination.transport = wait_and_move


@pytest.mark.parametrize("place", ["plain", "own"])
@pytest.mark.parametrize(
    ("kind", "length"), [("broadcast", 300_000), ("all_gather", 1_000_000), ("all_reduce", 10**6)]
)
def test_who_reads_too_late_is_told(
    kind: str, length: int, place: str, new_gate: Callable[[], Gate]
) -> None:
    args = (kind, length, place, [new_gate(), new_gate()])
    found = shoal.run(read_late, 2, "shm", args=args, timeout=30.0)
    assert found == ["DeadlineError", "PeerError"]

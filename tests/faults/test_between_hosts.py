"""The same faults where control goes over sockets, as it does between hosts."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import shoal
from faults.gate import Gate
from faults.worlds import (
    SOON_S,
    all_pids,
    assert_all_blame,
    assert_blames,
    kill,
    outcomes_between_hosts,
    site_of,
    timed,
    values,
    warnings_of_shoal,
)
from shoal.comm.control.sockets import topology
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.errors import DeadlineError, MismatchError, PeerError, ShoalError
from shoal.meeting.silence import SILENCE_VARIABLE


@pytest.fixture(autouse=True, params=[topology.ALL_PAIRS_RANKS, 1], ids=["all-pairs", "graph"])
def number_of_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds as they are, and connected as if they were large."""
    monkeypatch.setattr(topology, "ALL_PAIRS_RANKS", request.param)


def which_control() -> bool:
    world = shoal.world()
    return isinstance(world.backend._control, SocketControl)


def test_control_does_go_over_sockets() -> None:
    assert values(outcomes_between_hosts(which_control, ranks=2)) == [True, True]


def raise_between() -> None:
    world = shoal.world()
    world.all_reduce(torch.ones(2))
    world.barrier()
    if world.rank == 1:
        raise ValueError("boom")
    with timed():
        world.barrier() if world.rank == 0 else world.all_reduce(torch.ones(2))


def test_a_rank_raises() -> None:
    results = outcomes_between_hosts(raise_between, ranks=3)
    assert_all_blame(results, 1, f"ValueError: boom ({site_of(raise_between, 'raise V')})")


def leave_early() -> None:
    world = shoal.world()
    world.all_reduce(torch.ones(2))
    world.barrier()
    if world.rank != 1:
        with timed():
            world.recv(src=1)


def test_a_rank_leaves() -> None:
    results = outcomes_between_hosts(leave_early, ranks=3)
    for rank in (0, 2):
        assert_blames(results[rank], 1, "left")
        assert results[rank].error.seconds < SOON_S


def die(num_elements: int) -> None:
    world = shoal.world()
    world.all_reduce(torch.ones(2))
    world.barrier()
    if world.rank == 1:
        kill(os.getpid())
    with timed():
        world.all_reduce(torch.ones(num_elements))


@pytest.mark.parametrize("num_elements", [2, 1 << 20])
def test_a_rank_is_killed(num_elements: int) -> None:
    results = outcomes_between_hosts(die, num_elements, ranks=3)
    assert_all_blame(results, 1)
    assert all(results[rank].error.seconds < SOON_S for rank in (0, 2))


def stop() -> None:
    world = shoal.world()
    victim = all_pids()[1]
    if world.rank == 1:
        os.kill(victim, signal.SIGSTOP)
    try:
        with timed():
            world.all_reduce(torch.ones(2))
    finally:
        if world.rank == 0:
            kill(victim)


def test_a_rank_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can look at a process of another host: silence has to do."""
    monkeypatch.setenv(SILENCE_VARIABLE, "3")
    results = outcomes_between_hosts(stop, ranks=3)
    for rank in (0, 2):
        assert_blames(results[rank], 1, "silent")
        assert results[rank].error.seconds < SOON_S


def disagree() -> list[str]:
    world = shoal.world()
    messages = []
    for operation in (
        lambda: world.all_reduce(torch.ones(2 + (world.rank == 1))),
        lambda: world.barrier() if world.rank == 1 else world.all_gather_object(1),
        lambda: world.broadcast(torch.ones(2), root=int(world.rank == 1)),
        lambda: (
            world.recv(torch.ones(3), src=0)
            if world.rank == 1
            else world.send(torch.ones(2), dst=1)
        ),
    ):
        with pytest.raises(MismatchError) as caught:
            operation()
        messages.append(str(caught.value))
    assert world.all_reduce(torch.ones(1)).item() == world.size
    return messages


def test_ranks_disagree() -> None:
    first, second = values(outcomes_between_hosts(disagree, ranks=2))
    assert first == second
    assert all(__file__ in message for message in first)


def be_late(gate: Gate) -> None:
    world = shoal.world()
    world.barrier()  # the last that all take part in
    world.backend._state.timeout = 1.5  # not before: joining may take its time
    if world.rank == 1:
        gate.wait()
    try:
        with timed(), warnings_of_shoal() as messages:
            world.all_reduce(torch.ones(3))
    except ShoalError as error:
        error.warnings = messages  # type: ignore[attr-defined]
        if world.rank == 0:
            world.fail(error)
            gate.open()
        raise


def test_a_rank_is_late(gate: Gate) -> None:
    results = outcomes_between_hosts(be_late, gate, ranks=2)
    error = results[0].error
    assert isinstance(error, DeadlineError), results[0].traceback
    for message in (str(error), error.warnings[0]):
        assert "arrived: rank 0; missing: rank 1" in message
        assert site_of(be_late, "world.barrier()") in message
    assert isinstance(results[1].error, PeerError), results[1].traceback
    assert results[1].error.rank == 0

"""What is special to Gloo: no group of the script's, transfers that stall, ranks that leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import leaks
import shoal
from control_worlds import InnerBootstrap
from shoal.comm.bootstrap.connect import connect_backend
from shoal.comm.torch_groups.gloo import GlooBackend
from shoal.errors import DeadlineError, PeerError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.run import run_outcomes

SOON_S = 15.0  # for a machine that has other things to do; the timeout is 30 s
LARGE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def forkserver_is_up() -> None:
    """It serves all tests, so it is no leak of the first one."""
    fork_server()
    leaks.baseline()


def inner_worlds() -> Callable[[], GlooBackend]:
    """Makes Gloo worlds of the ranks of this one, one after the other; all ranks call it."""

    def connect() -> GlooBackend:
        backend = connect_backend("gloo", InnerBootstrap(shoal.world()), 30.0)
        assert isinstance(backend, GlooBackend)
        return backend

    return connect


# The script's own process group ------------------------------------------------------------


def beside_a_group_of_the_script() -> list[Any]:
    world = shoal.world()
    connect = inner_worlds()
    dist.init_process_group("gloo")  # at the master that `shoal.run` names
    try:
        own = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend = connect()
        is_apart = backend._group is not own
        total = backend.all_reduce(torch.ones(3)).tolist()
        backend.send(torch.ones(2), 1) if world.rank == 0 else backend.recv(src=0)
        backend.shutdown()
        after = torch.ones(1)
        dist.all_reduce(after)
        return [is_apart, total, dist.is_initialized(), after.item()]
    finally:
        world.barrier()
        dist.destroy_process_group()


def test_a_group_that_the_script_made_is_left_alone() -> None:
    """Its connections are proven by nobody."""
    results = shoal.run(beside_a_group_of_the_script, ranks=2, backend="shm", timeout=30)
    assert results == [[True, [2.0] * 3, True, 2.0]] * 2


def only_rank_0_has_a_group() -> bool:
    world = shoal.world()
    connect = inner_worlds()
    if world.rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with connect() as backend:
            return bool(backend.all_reduce(torch.ones(1)).item() == 2.0)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_group_of_other_ranks_is_not_used() -> None:
    assert shoal.run(only_rank_0_has_a_group, ranks=2, backend="shm", timeout=30) == [True, True]


# Transfers that stall ----------------------------------------------------------------------


def all_reduce() -> None:
    shoal.world().all_reduce(torch.ones(LARGE))


def reduce_sixteen_bit() -> None:
    shoal.world().all_reduce(torch.ones(LARGE, dtype=torch.bfloat16))


def all_gather() -> None:
    shoal.world().all_gather(torch.ones(LARGE))


def asynchronous() -> None:
    shoal.world().all_reduce(torch.ones(LARGE), async_op=True).wait()


def send_to_1() -> None:
    world = shoal.world()
    if world.rank == 0:
        world.send(torch.ones(LARGE), 1)
    elif world.rank == 1:
        world.recv(src=0)
    else:
        world.barrier()


def receive_from_1() -> None:
    world = shoal.world()
    if world.rank == 0:
        world.recv(src=1)
    elif world.rank == 1:
        world.send(torch.ones(LARGE), 0)
    else:
        world.barrier()


def hold_up(then: Callable[[], None]) -> None:
    """From now on this rank agrees to what the others do, but does ``then`` in its stead."""
    backend = shoal.world().backend

    def carry(*args: object) -> None:
        then()

    backend._carry = carry  # type: ignore[method-assign]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stall(operation: Callable[[], None], how: Callable[[], None]) -> None:
    world = shoal.world()
    pids = world.all_gather_object(os.getpid())
    if world.rank == 1:
        hold_up(how)
    begin = time.monotonic()
    try:
        operation()
    except (PeerError, DeadlineError) as error:
        error.seconds = time.monotonic() - begin  # type: ignore[union-attr]
        if world.rank == 0:
            with contextlib.suppress(ProcessLookupError):  # its launcher may be first
                os.kill(pids[1], signal.SIGKILL)
        raise


STALLED = [all_reduce, reduce_sixteen_bit, all_gather, asynchronous, send_to_1, receive_from_1]


@pytest.mark.parametrize("operation", STALLED, ids=lambda operation: operation.__name__)
def test_a_rank_that_is_stopped_in_a_transfer_is_named(operation: Callable[[], None]) -> None:
    results = run_outcomes(stall, (operation, stop), 3, "gloo", 30.0)
    for outcome in (results[0], results[2]):
        assert isinstance(outcome.error, PeerError), outcome.traceback
        assert outcome.error.rank == 1
        assert "stopped" in outcome.error.reason
        assert outcome.error.seconds < SOON_S  # type: ignore[attr-defined]


def raise_error() -> None:
    raise KeyError("lost")


def test_a_rank_that_raises_in_a_transfer_is_named() -> None:
    results = run_outcomes(stall, (all_reduce, raise_error), 3, "gloo", 30.0)
    for outcome in (results[0], results[2]):
        assert isinstance(outcome.error, PeerError), outcome.traceback
        assert outcome.error.rank == 1
        assert "lost" in outcome.error.reason


def sleep() -> None:
    time.sleep(20.0)


@pytest.mark.parametrize(
    "operation",
    [
        all_reduce,
        pytest.param(send_to_1, marks=pytest.mark.full),
        pytest.param(receive_from_1, marks=pytest.mark.full),
    ],
)
def test_a_transfer_that_stalls_ends_at_the_deadline(operation: Callable[[], None]) -> None:
    results = run_outcomes(stall, (operation, sleep), 2, "gloo", 5.0)
    error = results[0].error
    assert isinstance(error, DeadlineError), results[0].traceback
    assert "missing: rank 1" in str(error)
    assert 4.5 < error.seconds < SOON_S  # type: ignore[attr-defined]


# Ranks that leave --------------------------------------------------------------------------


def leave_early(num_worlds: int) -> list[float]:
    """The root of a broadcast, and the fastest of an all_reduce, are through before the others."""
    world = shoal.world()
    connect = inner_worlds()
    sums = []
    for number in range(num_worlds):
        with connect() as backend:
            root = number % world.size
            data = torch.full((100_000,), float(world.rank == root))
            backend.broadcast(data, root=root)
            sums.append(backend.all_reduce(data)[-1].item())
    world.barrier()
    return sums


def test_whoever_is_through_first_takes_nothing_from_the_others() -> None:
    results = shoal.run(leave_early, ranks=3, backend="shm", args=(8,), timeout=30)
    assert results == [[3.0] * 8] * 3


def leave_before_a_slow_rank(seconds: float) -> float:
    world = shoal.world()
    connect = inner_worlds()
    backend = connect()
    backend.all_reduce(torch.ones(2))
    if world.rank == 1:  # it has not got as far as rank 0 for a while
        settle = backend._channel.settle

        def settle_late(number: int) -> None:
            backend._channel.settle = settle
            time.sleep(seconds)
            settle(number)

        backend._channel.settle = settle_late
    backend.all_reduce(torch.ones(2))
    begin = time.monotonic()
    backend.shutdown()
    taken = time.monotonic() - begin
    world.barrier()
    return taken


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [(1.0, 0.5, SOON_S), pytest.param(20.0, 4.0, 12.0, marks=pytest.mark.full)],
)
def test_a_rank_waits_for_the_others_before_it_leaves_but_not_for_ever(
    seconds: float, least: float, most: float
) -> None:
    taken = shoal.run(leave_before_a_slow_rank, ranks=2, backend="shm", args=(seconds,), timeout=40)
    assert least < taken[0] < most


# Numbers -----------------------------------------------------------------------------------


def awkward_numbers() -> list[Any]:
    world = shoal.world()
    nan = torch.tensor([float("nan"), 1.0]) if world.rank == 1 else torch.tensor([0.0, 2.0])
    extremes = [world.all_reduce(nan.clone(), op).tolist() for op in ("min", "max")]
    # 256 + 1 + 1 is 258 in bfloat16; rounded after each step it would stay 256.
    fine = torch.tensor([256.0 if world.rank == 0 else 1.0], dtype=torch.bfloat16)
    return [str(extremes), world.all_reduce(fine).item()]


def test_numbers_that_gloo_alone_gets_wrong() -> None:
    results = shoal.run(awkward_numbers, ranks=3, backend="gloo", timeout=30)
    assert results == [["[[nan, 1.0], [nan, 2.0]]", 258.0]] * 3


# Long exchanges between hosts ---------------------------------------------------------------


def exchange_as_between_hosts() -> list[bool]:
    """Every length counts as long; elements say who sent them, to whom, and where they lay."""
    GlooBackend._is_long = lambda self, num_bytes: True  # type: ignore[method-assign]
    world = shoal.world()
    size, rank = world.size, world.rank

    def rows(sender: int, receiver: int) -> torch.Tensor:
        count = (sender + 2 * receiver) % 4  # some send nothing
        return torch.arange(count, dtype=torch.float64) + 100 * sender + 10 * receiver

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    everybody = range(size)
    sent = [rows(rank, other) for other in everybody]
    swapped = world.backend.all_to_all(joined(sent), sizes=[part.numel() for part in sent])
    gathered = world.backend.all_gather(rows(rank, 0))
    summed = world.backend.reduce_scatter(torch.arange(7.0) * (rank + 1))
    parts = torch.arange(7.0).tensor_split(size)
    at_root = world.backend.gather(rows(rank, 1), root=1)
    return [
        torch.equal(swapped, joined([rows(other, rank) for other in everybody])),
        torch.equal(gathered, joined([rows(other, 0) for other in everybody])),
        torch.equal(summed, parts[rank] * sum(range(1, size + 1))),
        at_root is None or torch.equal(at_root, joined([rows(other, 1) for other in everybody])),
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_long_exchanges_between_hosts(ranks: int) -> None:
    results = shoal.run(exchange_as_between_hosts, ranks=ranks, backend="gloo", timeout=30)
    assert results == [[True] * 4] * ranks

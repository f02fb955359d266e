"""Ranks that are slow and right: nobody takes them for a deadlock."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import pools
import shoal
from faults.gate import Gate
from faults.worlds import outcomes, outcomes_between_hosts, values, world
from shoal.comm.backend import Backend
from shoal.comm.control.deadlock import watch
from shoal.comm.control.deadlock.record import WaitRecord
from shoal.comm.world import World

PROCESSES = [world("shm", 3), world("gloo", 3), world("mpi", 2, full=True)]


def hurry(seconds: float) -> None:
    watch.LONG_S = watch.CERTAIN_S = seconds
    watch.EXAMINE_EVERY_S = seconds / 5


def work_for(seconds: float) -> None:
    """As a rank does that has more to compute than the others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(1000).sum()


def compute_while_others_wait() -> float:
    hurry(0.1)
    world = shoal.world()
    group = world.subgroup([0, 1])
    if world.rank == 0:
        work_for(2.0)
    if group is not None:
        group.barrier()
    return world.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize(("backend", "ranks"), PROCESSES)
def test_a_rank_that_computes(backend: str, ranks: int) -> None:
    results = outcomes(compute_while_others_wait, backend=backend, ranks=ranks)
    assert values(results) == [float(ranks)] * ranks


def test_a_rank_that_computes_between_hosts() -> None:
    results = outcomes_between_hosts(compute_while_others_wait, ranks=3)
    assert values(results) == [3.0] * 3


def two_groups() -> tuple[World, Backend]:
    """The world, and a group of the same two ranks."""
    hurry(0.1)
    group = shoal.world().subgroup([0, 1])
    assert group is not None
    return shoal.world(), group


def in_the_other_order(group: Backend) -> float:
    """What the other rank begins with comes last here."""
    group.barrier()
    return float(shoal.world().all_reduce(torch.ones(1)).item())


def sleep_in_another_thread() -> float:
    """The main threads look like a deadlock; the other thread of rank 0 is what resolves it."""
    world, group = two_groups()
    if world.rank == 1:
        return in_the_other_order(group)

    def come_late() -> None:
        work_for(1.5)
        group.barrier()

    late = threading.Thread(target=come_late)
    late.start()
    total = world.all_reduce(torch.ones(1)).item()
    late.join()
    return total


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 2)])
def test_another_thread_of_the_rank(backend: str, ranks: int) -> None:
    results = outcomes(sleep_in_another_thread, backend=backend, ranks=ranks)
    assert values(results) == [2.0, 2.0]


def send_by_a_timer(how: str) -> float:
    """All threads of rank 1 seem to wait, and one of Python's own will call the user's code."""
    hurry(0.1)
    world = shoal.world()
    if world.rank == 0:
        world.recv(src=1, tag=7)
        world.send(torch.ones(1), dst=1)
        return 1.0

    def send(*_: object) -> None:
        world.send(torch.ones(1), dst=0, tag=7)

    if how == "timer":
        threading.Timer(1.5, send).start()
    elif how == "pool":
        ThreadPoolExecutor(1).submit(work_for, 1.5).add_done_callback(send)
    else:
        signal.signal(signal.SIGALRM, send)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
    return float(world.recv(src=0).item())


@pytest.mark.parametrize("how", ["timer", "pool", "signal"])
def test_what_python_will_call(how: str) -> None:
    assert values(outcomes(send_by_a_timer, how, backend="shm", ranks=2)) == [1.0, 1.0]


def wait_with_a_limit() -> float:
    """Rank 0 waits for a posted operation for so long only, and does something else then."""
    world, group = two_groups()
    if world.rank == 1:
        return in_the_other_order(group)
    work = world.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(shoal.errors.DeadlineError, match="still under way"):
        work.wait(timeout=1.0)
    group.barrier()
    return work.wait().item()


@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 2)])
def test_a_wait_with_a_limit_of_its_own(backend: str, ranks: int) -> None:
    assert values(outcomes(wait_with_a_limit, backend=backend, ranks=ranks)) == [2.0, 2.0]


class Slow(nn.Module):
    """Takes its time in the backward of rank 1, while reductions are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.requires_grad and shoal.world().rank == 1:
            hidden.register_hook(lambda _: work_for(1.2))
        out: torch.Tensor = self.second(hidden)
        return out


def compute_during_reductions(strategy: str) -> int:
    hurry(0.1)
    torch.manual_seed(0)
    plain = Slow()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(plain, sgd, strategy=strategy)
    for _ in range(2):
        model(torch.randn(4, 64) + shoal.world().rank).square().mean().backward()
        if shoal.world().rank == 0:
            work_for(0.7)
        optimizer.step()
        optimizer.zero_grad()
    return 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 2), world("gloo", 2)])
def test_long_computation_with_reductions_under_way(
    backend: str, ranks: int, strategy: str
) -> None:
    results = outcomes(compute_during_reductions, strategy, backend=backend, ranks=ranks)
    assert values(results) == [1] * ranks


def look_at_a_late_rank(gate: Gate) -> tuple[bool, str]:
    """What rank 0 shows while it waits, as rank 1 sees it that does not come."""
    hurry(0.05)
    world = shoal.world()
    control = world.backend._control
    if world.rank == 0:
        world.barrier()
        gate.wait()
        return (bool(control.shown_waits()), "")
    deadline = time.monotonic() + 20.0
    while not (shown := control.shown_waits()) and time.monotonic() < deadline:
        work_for(0.01)
    record = WaitRecord.decode(shown[0])
    world.barrier()
    gate.open()
    assert record is not None
    return (False, record.call)


def test_what_is_shown_is_taken_back(gate: Gate) -> None:
    results = values(outcomes(look_at_a_late_rank, gate, backend="shm", ranks=2))
    assert results[0] == (False, "")
    assert results[1][1].startswith("world.barrier() at ")


def slow_but_right(seed: int, num_runs: int) -> int:
    """Random calls in random groups, with random work in between, in one order on all ranks."""
    hurry(0.02)
    world = shoal.world()
    groups = [world.backend, world.subgroup([0, 1]), world.subgroup([1, 2]), world.subgroup([0, 2])]
    together, alone = random.Random(seed), random.Random(seed + world.rank + 1)
    for _ in range(num_runs):
        for _ in range(together.randint(1, 3)):
            group, call = together.choice(groups), together.choice(CALLS)
            if alone.random() < 0.2:
                work_for(alone.choice([0.03, 0.06, 0.12]))
            if group is not None:
                call(group)
    return num_runs


def post_and_wait(group: shoal.comm.Backend) -> None:
    work = group.all_reduce(torch.ones(8), async_op=True)
    work_for(0.002)
    assert work.wait()[0].item() == group.size


def pass_on(group: shoal.comm.Backend) -> None:
    """Around the group, the first rank last."""
    if group.rank:
        group.recv(src=group.rank - 1)
    if group.rank + 1 < group.size:
        group.send(torch.ones(1), group.rank + 1)


CALLS: list[Callable[[shoal.comm.Backend], object]] = [
    lambda group: group.barrier(),
    lambda group: group.all_reduce(torch.ones(3)),
    lambda group: group.all_gather_object("x"),
    post_and_wait,
    pass_on,
]


@pytest.mark.parametrize(
    ("backend", "num_runs"),
    [("shm", 30), ("gloo", 30)]
    + [
        pytest.param(each, 1000, marks=[pytest.mark.full, pytest.mark.slow])
        for each in ("shm", "gloo")
    ],
)
@pytest.mark.timeout(400)
def test_slow_but_right_runs(backend: str, num_runs: int) -> None:
    """With a fiftieth of the usual patience: every other wait is a long one."""
    try:
        assert pools.get(backend, 3).run(slow_but_right, 7, num_runs) == [num_runs] * 3
    finally:
        pools.close_all()

"""Worlds beside, inside and after each other; many ranks; runs that repeat exactly."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

import leaks
import shoal
from pools import Team
from shoal.errors import ClosedError, PeerError
from shoal.launch.function.forkserver.forkserver import fork_server

# Isolation ------------------------------------------------------------------------------


def sums(rounds, value, start):
    """Waits until another world runs as well, then works beside it."""
    world = shoal.world()
    if world.rank == 0:
        start()
    totals = set()
    for _ in range(rounds):
        totals.add(world.all_reduce(torch.tensor([value])).item())
        time.sleep(0)  # lets the other world's threads in
    return world.size, totals


def test_two_worlds_in_one_process_at_once() -> None:
    together = threading.Barrier(2, timeout=20)
    results = {}

    def run(ranks, value):
        results[ranks] = shoal.run(sums, ranks, "memory", args=(200, value, together.wait))

    threads = [threading.Thread(target=run, args=each) for each in ((3, 1), (5, 100))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {3: [(3, {3})] * 3, 5: [(5, {500})] * 5}
    with pytest.raises(ClosedError):
        shoal.world()


def fail_while_other_runs(start, should_fail):
    world = shoal.world()
    if world.rank == 0:
        start()
    if should_fail and world.rank == 1:
        raise KeyError("only here")
    for _ in range(50):
        world.barrier()
    return world.rank


def test_a_failure_stays_in_its_world() -> None:
    together = threading.Barrier(2, timeout=20)
    outcomes = {}

    def run(should_fail):
        try:
            args = (together.wait, should_fail)
            outcomes[should_fail] = shoal.run(fail_while_other_runs, 3, "memory", args=args)
        except Exception as error:
            outcomes[should_fail] = error

    threads = [threading.Thread(target=run, args=(flag,)) for flag in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[False] == [0, 1, 2]
    assert isinstance(outcomes[True], KeyError)


def inner(outer_rank):
    world = shoal.world()
    return world.all_gather_object((outer_rank, world.rank, world.size))


def outer():
    world = shoal.world()
    before = world.all_reduce(torch.ones(1)).item()
    results = shoal.run(inner, 2 + world.rank, "memory", args=(world.rank,))
    assert shoal.world() is world
    return before, results, world.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_nested_runs(backend) -> None:
    for rank, (before, results, after) in enumerate(Team(backend, 3).run(outer)):
        size = 2 + rank
        assert (before, after) == (3.0, 3.0)
        assert results == [[(rank, place, size) for place in range(size)]] * size


def test_worlds_after_each_other() -> None:
    for ranks in (2, 1, 3):
        assert shoal.run(lambda: shoal.world().size, ranks, "memory") == [ranks] * ranks


def world_in_threads():
    """Threads that a rank starts find its world only where the rank is a process."""
    found = []

    def look():
        try:
            found.append(shoal.world().rank)
        except ClosedError:
            found.append(None)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_threads_of_a_rank() -> None:
    assert Team("shm", 2).run(world_in_threads) == [0, 1]
    assert Team("memory", 2).run(world_in_threads) == [None, None]


# Many ranks -----------------------------------------------------------------------------


def work_of_many(rounds):
    world = shoal.world()
    group = world.split(world.rank % 4)
    for _ in range(rounds):
        total = world.all_reduce(torch.ones(3))
        assert total.tolist() == [float(world.size)] * 3
        group.barrier()
    return int(group.all_reduce(torch.tensor([world.rank])).item())


def test_64_threads_as_ranks() -> None:
    results = shoal.run(work_of_many, 64, "memory", args=(10,))
    assert results == [sum(range(rank % 4, 64, 4)) for rank in range(64)]


def many_barriers(count):
    world = shoal.world()
    for _ in range(count):
        world.barrier()
    return world.stats()["barrier"].calls


@pytest.mark.slow
def test_16_processes_complete_1000_barriers() -> None:
    fork_server()
    leaks.baseline()
    assert shoal.run(many_barriers, 16, "shm", args=(1000,)) == [1000] * 16


# Determinism ----------------------------------------------------------------------------


def draw_numbers():
    """Draws, with turns of other ranks between the draws."""
    world = shoal.world()
    numbers = []
    for _ in range(3):
        numbers += [torch.rand(1).item(), float(np.random.rand()), random.random()]
        world.barrier()
    numbers.append(torch.randn(2, 2).sum().item())
    return numbers


def test_runs_repeat_exactly() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    first = shoal.run(draw_numbers, 4, "memory")
    second = shoal.run(draw_numbers, 4, "memory")
    assert first == second
    assert all(numbers == first[0] for numbers in first)  # each rank as if it were alone
    assert len(set(first[0])) == len(first[0])
    torch.manual_seed(6)
    np.random.seed(6)
    random.seed(6)
    assert not set(shoal.run(draw_numbers, 4, "memory")[0]) & set(first[0])


def build_models():
    world = shoal.world()
    first = torch.nn.Linear(5, 5)
    world.barrier()
    second = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout(0.5))
    world.all_reduce(torch.ones(1))
    output = second(first(torch.ones(20, 5)))
    return torch.cat(
        [p.detach().flatten() for p in (*first.parameters(), *second.parameters())]
    ), output


def test_models_built_in_ranks_are_equal() -> None:
    results = shoal.run(build_models, 4, "memory")
    for parameters, output in results:
        assert torch.equal(parameters, results[0][0])
        assert torch.equal(output, results[0][1])


def seed_apart():
    world = shoal.world()
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)
    random.seed(world.rank)
    world.barrier()
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def alone(rank):
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_each_rank_has_its_own_random_state() -> None:
    assert shoal.run(seed_apart, 3, "memory") == [alone(rank) for rank in range(3)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_random_state_is_untouched(fails) -> None:
    def disturb():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        shoal.world().barrier()
        if fails:
            raise ValueError("a reason")
        return torch.rand(3), np.random.rand(3), random.random()

    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    try:
        shoal.run(disturb, 3, "memory")
    except ValueError:
        assert fails
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_turns_are_the_same_in_every_run() -> None:
    order = []

    def note():
        world = shoal.world()
        for _ in range(5):
            taken(world.rank)
            world.barrier()

    class Taken:
        """Cannot be pickled, so all ranks share it."""

        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, rank):
            order.append(rank)

    taken = Taken()
    shoal.run(note, 4, "memory")
    first, order = list(order), []
    shoal.run(note, 4, "memory")
    assert first == order
    assert sorted(first) == sorted([0, 1, 2, 3] * 5)


# Copies ---------------------------------------------------------------------------------


def change(values, tensor, model):
    world = shoal.world()
    values.append(world.rank)
    tensor.fill_(world.rank)
    with torch.no_grad():
        model.weight.fill_(world.rank)
    world.barrier()
    return values, tensor.tolist(), model.weight.sum().item()


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_every_rank_has_its_own_copy_of_arguments(backend) -> None:
    values, tensor, model = [], torch.full((2,), 9.0), torch.nn.Linear(1, 1)
    weight = model.weight.item()
    results = Team(backend, 3).run(change, values, tensor, model)
    assert results == [([rank], [float(rank)] * 2, float(rank)) for rank in range(3)]
    assert (values, tensor.tolist(), model.weight.item()) == ([], [9.0, 9.0], weight)


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_every_rank_has_its_own_copy_of_closures(backend) -> None:
    box, shared = {"ranks": []}, torch.zeros(1)

    def note():
        world = shoal.world()
        box["ranks"].append(world.rank)
        shared.add_(world.rank + 1)
        world.barrier()
        return box["ranks"], shared.item()

    assert Team(backend, 3).run(note) == [([rank], rank + 1.0) for rank in range(3)]
    assert (box, shared.item()) == ({"ranks": []}, 0.0)


# Exceptions -----------------------------------------------------------------------------


class OwnError(Exception):
    """Needs more than a message to be made."""

    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code, self.detail = code, detail


def fail_on(rank, error):
    world = shoal.world()
    world.barrier()
    if world.rank == rank:
        raise error
    world.barrier()


@pytest.mark.parametrize("backend", ["memory", "shm"])
@pytest.mark.parametrize(
    "error",
    [ValueError("a reason"), OwnError(3, {"a": 1})],
    ids=lambda error: type(error).__name__,
)
def test_the_first_failing_ranks_exception_is_what_the_caller_sees(backend, error) -> None:
    fork_server()
    leaks.baseline()
    with pytest.raises(type(error)) as caught:
        shoal.run(fail_on, 3, backend, args=(1, error))
    assert caught.value.args == error.args
    notes = "\n".join(caught.value.__notes__)
    assert "raised on rank 1" in notes
    assert "in fail_on" in notes
    if isinstance(error, OwnError):
        assert (caught.value.code, caught.value.detail) == (3, {"a": 1})


@pytest.mark.parametrize("backend", ["memory", "shm"])
@pytest.mark.parametrize(
    "ending", [KeyboardInterrupt(), SystemExit(4)], ids=lambda ending: type(ending).__name__
)
def test_a_rank_that_asks_to_exit_does_not_take_the_caller_with_it(backend, ending) -> None:
    fork_server()
    leaks.baseline()
    with pytest.raises(PeerError, match=f"rank 1 failed: it ended by {type(ending).__name__}"):
        shoal.run(fail_on, 3, backend, args=(1, ending))


def others_hear():
    world = shoal.world()
    if world.rank == 2:
        raise ZeroDivisionError("here")
    try:
        world.barrier()
    except PeerError as error:
        heard(world.rank, error)
        raise


def heard(rank, error):
    raise RuntimeError(f"rank {rank} heard of rank {error.rank}: {error.reason}") from error


def test_a_later_failure_does_not_hide_the_first() -> None:
    with pytest.raises(ZeroDivisionError, match="here"):
        shoal.run(others_hear, 4, "memory")

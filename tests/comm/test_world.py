"""What a world tells of itself and counts, its memory, its end and what comes after."""

from __future__ import annotations

import pytest
import torch

import leaks
import shoal
from pools import Team
from shoal.errors import ClosedError
from shoal.launch.function.forkserver.forkserver import fork_server


def count():
    backend = shoal.world().backend
    backend.reset_stats()
    size = backend.size
    backend.all_reduce(torch.zeros(100))
    work = backend.all_reduce(torch.zeros(50, dtype=torch.float64), async_op=True)
    work.wait()
    work.wait()  # twice is still one operation
    backend.all_gather(torch.zeros(7))
    backend.reduce_scatter(torch.zeros(size, 3))
    backend.broadcast(torch.zeros(11, dtype=torch.uint8) if backend.rank == 0 else None)
    backend.barrier()
    group = backend.split(0)
    before = backend.stats()
    group.all_reduce(torch.zeros(1))
    after = backend.stats()
    figures = {kind: (counter.calls, counter.num_bytes) for kind, counter in before.items()}
    times = [(c.seconds, c.waiting_seconds) for c in after.values()]
    backend.reset_stats()
    return figures, after["all_reduce"].calls, times, dict(backend.stats())


def test_counters(team: Team) -> None:
    for figures, calls, times, cleared in team.run(count):
        assert figures["all_reduce"] == (2, 800)
        assert figures["all_gather"][0] == 2  # the other is the split's
        assert figures["all_gather"][1] >= 28 * team.size
        assert figures["reduce_scatter"] == (1, 12 * team.size)
        assert figures["broadcast"] == (1, 11)
        assert figures["barrier"] == (1, 0)
        assert calls == 3
        assert all(0 <= waiting <= seconds for seconds, waiting in times)
        assert cleared == {}


def count_messages():
    backend = shoal.world().backend
    backend.reset_stats()
    if backend.rank == 0:
        backend.send(torch.zeros(10), 1)
    elif backend.rank == 1:
        backend.recv(src=0)
    return {kind: (c.calls, c.num_bytes) for kind, c in backend.stats().items()}


def test_counters_of_messages(several: Team) -> None:
    results = several.run(count_messages)
    assert results[:2] == [{"send": (1, 40)}, {"recv": (1, 40)}]
    assert all(result == {} for result in results[2:])


def read_only():
    """What stats returns is a copy."""
    backend = shoal.world().backend
    backend.barrier()
    backend.stats()["barrier"].calls = 1000
    return backend.stats()["barrier"].calls


def test_counters_cannot_be_changed_from_outside() -> None:
    assert max(Team("memory", 2).run(read_only)) < 1000


def describe():
    world = shoal.world()
    backend = world.backend
    return (
        (world.rank, world.size, world.world_size, backend.world_size),
        (backend.name, backend.ranks, backend.timeout > 0, backend.device.type),
        repr(world),
    )


def test_what_a_world_says_of_itself(team: Team) -> None:
    for rank, (numbers, about, text) in enumerate(team.run(describe)):
        size = team.size
        assert numbers == (rank, size, size, size)
        assert about == (team.backend, tuple(range(size)), True, "cpu")
        assert text == f"<World rank {rank} of {size} over {team.backend}>"


def forwarded():
    world = shoal.world()
    tensor = torch.ones(2)
    world.barrier()
    assert world.all_reduce(tensor) is tensor
    assert world.all_gather(tensor).shape == (2 * world.size,)
    assert world.broadcast(tensor) is tensor
    assert world.all_gather_object(world.rank) == list(range(world.size))
    assert world.stats()["all_reduce"].calls >= 1
    with pytest.raises(AttributeError):
        world.no_such_thing  # noqa: B018
    return True


def test_a_world_offers_what_its_backend_does(several: Team) -> None:
    assert all(several.run(forwarded))


def borrow(numel, dtype):
    backend = shoal.world().backend
    first, second = (backend.empty(numel, dtype) for _ in range(2))
    first.fill_(1)
    second.fill_(0)
    assert (first.dim(), first.numel(), first.dtype) == (1, numel, dtype)
    assert bool((first == 1).all())
    assert not bool(second.any())
    assert backend.empty(3).dtype is torch.get_default_dtype()
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000003])
def test_memory_from_the_backend(several: Team, numel, dtype) -> None:
    assert all(several.run(borrow, numel, dtype))


def borrow_and_return(rounds):
    """Memory that is let go of is really gone, here and where others mapped it."""
    backend = shoal.world().backend
    before = _num_mapped()
    for index in range(rounds):
        tensor = backend.empty(1 << 19).fill_(index)
        assert backend.all_reduce(tensor)[-1].item() == index * backend.size
        del tensor
    backend.barrier()
    return _num_mapped() - before


def _num_mapped():
    with open("/proc/self/maps") as maps:
        return sum("shoal-data" in line for line in maps)


@pytest.mark.parametrize("size", [2, 3])
def test_freed_memory_is_unmapped_everywhere(size) -> None:
    growth = Team("shm", size).run(borrow_and_return, 40)
    assert max(growth) <= 2 * size, growth  # at most the last of each rank


# The end --------------------------------------------------------------------------------


def shut_down_twice():
    world = shoal.world()
    group = world.split(0)
    world.barrier()
    world.shutdown()
    world.shutdown()
    world.backend.shutdown()
    errors = []
    calls = [
        world.barrier,
        lambda: world.all_reduce(torch.ones(1)),
        lambda: group.all_reduce(torch.ones(1)),
        lambda: world.broadcast_object(1),
        lambda: world.recv(src=(world.rank + 1) % world.size),
        shoal.world,
    ]
    for call in calls:
        try:
            call()
        except ClosedError as error:
            errors.append(str(error))
    return errors


PROCESS = [
    pytest.param("gloo", marks=pytest.mark.full),
    pytest.param("mpi", marks=pytest.mark.full),
]


@pytest.mark.parametrize("backend", ["memory", "shm", *PROCESS])
def test_shutting_down_twice_is_fine_and_use_afterwards_is_an_error(backend) -> None:
    fork_server()
    leaks.baseline()
    for errors in shoal.run(shut_down_twice, 2, backend):
        assert len(errors) == 6
        assert all("was shut down; call shoal.init()" in error for error in errors[:5])
        assert "call shoal.init() first" in errors[5]


def test_a_world_used_too_early_says_what_to_do() -> None:
    with pytest.raises(ClosedError, match=r"call shoal\.init\(\) first"):
        shoal.world()


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_init_without_ranks_is_a_world_of_one(backend) -> None:
    with shoal.init(backend) as world:
        assert shoal.world() is world
        assert (world.rank, world.size) == (0, 1)
        assert world.all_reduce(torch.ones(2), "average").tolist() == [1.0, 1.0]
        with pytest.raises(shoal.errors.ShoalError, match=r"already part of .* shutdown\(\)"):
            shoal.init(backend)
    with pytest.raises(ClosedError):
        shoal.world()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="memory, shm, gloo, nccl, mpi or auto; got 'carrier'"):
        shoal.run(print, 2, "carrier")
    with pytest.raises(ValueError, match="at least 1; got 0"):
        shoal.run(print, 0, "memory")

"""Mistakes that earlier attempts at this system made, one test each, by the id of the mistake."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from faults.worlds import (
    assert_all_blame,
    assert_blames,
    memfds_of_shoal,
    outcomes,
    outcomes_between_hosts,
    values,
    world,
)
from shoal.comm.control.sockets import frames
from shoal.comm.mpi import runtime as mpi_runtime
from shoal.errors import BackendUnavailableError, MismatchError

EACH = [world("memory", 3), world("shm", 3), world("gloo", 2), world("mpi", 2, full=True)]


# P1 ---------------------------------------------------------------------------------------


def fail_while_others_wait() -> None:
    world = shoal.world()
    if world.rank == 1:
        raise ValueError("gone")
    (world.barrier if world.rank == 0 else lambda: world.all_reduce(torch.ones(1)))()


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p01_a_wait_ends_when_a_rank_fails(backend: str, ranks: int) -> None:
    """A rank failed, and the others stayed in their barrier or all-reduce for ever."""
    begin = time.monotonic()
    results = outcomes(fail_while_others_wait, backend=backend, ranks=ranks, timeout=600)
    assert time.monotonic() - begin < 30
    assert_all_blame(results, 1, "ValueError: gone")


# P2 ---------------------------------------------------------------------------------------


def add_up(start: int, other_world: threading.Barrier) -> list[float]:
    world = shoal.world()
    group = world.split(world.rank % 2)
    found = []
    for step in range(20):
        if world.rank == 0:
            other_world.wait(30)  # both worlds are in the same operation now
        found.append(world.all_reduce(torch.tensor([float(start + step)])).item())
        found.append(group.all_reduce(torch.tensor([float(start)])).item())
    return found


def test_p02_two_worlds_in_one_process_never_meet() -> None:
    """Barriers and buffers were static, so two runs in one process got each other's numbers."""
    meeting = threading.Barrier(2)  # which cannot be copied, so the ranks share it
    found: dict[int, list[list[float]]] = {}

    def run(start: int) -> None:
        found[start] = shoal.run(add_up, 3, "memory", (start, meeting), timeout=30)

    threads = [threading.Thread(target=run, args=(start,)) for start in (100, 7000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in (100, 7000):
        for rank, results in enumerate(found[start]):
            assert results[::2] == [3.0 * (start + step) for step in range(20)]
            assert results[1::2] == [start * (1.0 if rank == 1 else 2.0)] * 20


# P3 ---------------------------------------------------------------------------------------


def clean_up(leaver: int) -> list[str]:
    """What this process still holds after its world was shut down."""
    world = shoal.world()
    memory = world.backend.empty(1 << 20)
    world.all_reduce(memory.fill_(1.0))
    world.all_reduce(torch.ones(4), async_op=True).wait()
    world.barrier()
    if world.rank == leaver:
        raise ValueError("leaves the rest to the others")
    del memory
    world.shutdown()
    descriptors = [
        str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()
    ]
    maps = Path("/proc/self/maps").read_text()
    threads = [thread.name for thread in threading.enumerate()]
    held = [name for name in descriptors if "memfd:shoal" in name]
    held += [line for line in maps.splitlines() if "memfd:shoal" in line]
    return held + [name for name in threads if name.startswith("shoal")]


@pytest.mark.parametrize("leaver", [0, 1, -1])
@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 3), world("gloo", 2)])
def test_p03_every_rank_cleans_up_after_itself(backend: str, ranks: int, leaver: int) -> None:
    """Only rank 0 cleaned up, so when it was the one to fail nobody did."""
    results = outcomes(clean_up, leaver, backend=backend, ranks=ranks)
    assert [outcome.value for outcome in results if outcome.rank != leaver] == [[]] * (
        ranks - (leaver >= 0)
    )
    assert memfds_of_shoal() == []


# P4 ---------------------------------------------------------------------------------------


def conventions() -> list[str]:
    """Operations that break the one convention: in place if shapes allow, else into ``out``."""
    world = shoal.world()
    broken = []
    given = torch.ones(world.size * 2)

    def expect(what: str, is_right: bool) -> None:
        if not is_right:
            broken.append(what)

    for name, call in {
        "all_reduce": lambda t: world.all_reduce(t),
        "broadcast": lambda t: world.broadcast(t, root=1),
    }.items():
        tensor = given.clone()
        expect(name, call(tensor) is tensor)
    tensor = given.clone()
    reduced = world.reduce(tensor, root=1)
    expect("reduce", (reduced is tensor) if world.rank == 1 else (reduced is None))
    if world.rank == 0:
        world.send(given, dst=1)
    if world.rank == 1:
        tensor = torch.empty_like(given)
        expect("recv", world.recv(tensor, src=0) is tensor)

    rows = {"all_gather": given.numel() * world.size, "reduce_scatter": 2, "all_to_all": 2}
    rows["all_to_all"] = 2 * world.size
    for name, num_rows in rows.items():
        call = getattr(world, name)
        tensor, out = given.clone(), torch.zeros(num_rows)
        expect(f"{name} into out", call(tensor, out=out) is out)
        fresh = call(tensor)
        expect(f"{name} into a new tensor", torch.equal(fresh, out) and fresh is not out)
        expect(f"{name} leaves its input", torch.equal(tensor, given))
    gathered = world.gather(given, root=1)
    expect("gather", (gathered is None) != (world.rank == 1))
    out = torch.zeros(2)
    expect("scatter", world.scatter(given if world.rank == 0 else None, out=out) is out)
    return broken


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p04_one_convention_for_what_is_in_place(backend: str, ranks: int) -> None:
    """All-reduce worked in place while broadcast and gather returned copies."""
    assert values(outcomes(conventions, backend=backend, ranks=ranks)) == [[]] * ranks


# P5 ---------------------------------------------------------------------------------------


def averages() -> list[list[float]]:
    world = shoal.world()
    mine = torch.arange(1.0, 1.0 + world.size) * (world.rank + 1)
    root = world.reduce(mine.clone(), "average", root=0)
    return [
        world.all_reduce(mine.clone(), "average").tolist(),
        world.all_gather(world.reduce_scatter(mine, "average")).tolist(),
        mine.tolist() if root is None else root.tolist(),
    ]


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p05_an_average_divides_the_sum_once(backend: str, ranks: int) -> None:
    """The average was divided twice on one path and not at all on another."""
    mean = sum(range(1, ranks + 1)) / ranks
    expected = [mean * (i + 1) for i in range(ranks)]
    for rank, found in enumerate(values(outcomes(averages, backend=backend, ranks=ranks))):
        whole, scattered, reduced = found
        assert whole == pytest.approx(expected)
        assert scattered == pytest.approx(expected)
        if rank == 0:
            assert reduced == pytest.approx(expected)


# P6 ---------------------------------------------------------------------------------------


def everything_is_global() -> dict[str, list[float]]:
    """What each operation gives; the same call with local data alone would give something else."""
    world = shoal.world()
    rank, size = float(world.rank), world.size
    mine = torch.full((size,), rank + 1)
    right, left = (world.rank + 1) % size, (world.rank - 1) % size
    sent = world.send(mine, dst=right, tag=4, async_op=True)
    found = {"recv": world.recv(src=left, tag=4)}
    sent.wait()
    found["all_reduce"] = world.all_reduce(mine.clone())
    found["broadcast"] = world.broadcast(mine.clone(), root=size - 1)
    found["all_gather"] = world.all_gather(mine[:1])
    found["reduce_scatter"] = world.reduce_scatter(mine)
    found["all_to_all"] = world.all_to_all(mine)
    found["scatter"] = world.scatter(mine if world.rank == 1 else None, root=1)
    gathered = world.gather(mine[:1], root=1)
    reduced = world.reduce(mine.clone(), root=1)
    if world.rank == 1:
        found |= {"gather": gathered, "reduce": reduced}
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p06_nothing_is_a_stub_or_local(backend: str, ranks: int) -> None:
    """Send and receive did nothing, and collectives gave back each process's own data."""
    each = [float(rank + 1) for rank in range(ranks)]
    total = sum(each)
    results = values(outcomes(everything_is_global, backend=backend, ranks=ranks))
    for rank, found in enumerate(results):
        assert found["recv"] == [each[rank - 1]] * ranks
        assert found["all_reduce"] == [total] * ranks
        assert found["broadcast"] == [each[-1]] * ranks
        assert found["all_gather"] == found["all_to_all"] == each
        assert found["reduce_scatter"] == [total]
        assert found["scatter"] == [each[1]]
    assert results[1]["gather"] == each
    assert results[1]["reduce"] == [total] * ranks


# P7 ---------------------------------------------------------------------------------------


def talk_on() -> int:
    world = shoal.world()
    peer = 1 - world.rank
    for number in range(200):
        if world.rank == number % 2:
            world.send(torch.tensor([number]), dst=peer)
        else:
            assert world.recv(src=peer).item() == number
        if number % 50 == 0:
            world.barrier()
    return world.all_reduce(torch.tensor([1])).item()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_p07_a_connection_outlives_its_first_message(backend: str) -> None:
    """The connection was closed after the hand-shake, or after the first message."""
    assert values(outcomes(talk_on, backend=backend, ranks=2)) == [2, 2]


def test_p07_also_between_hosts() -> None:
    """There, control has connections of its own."""
    assert values(outcomes_between_hosts(talk_on, ranks=2)) == [2, 2]


# P8 ---------------------------------------------------------------------------------------


def test_p08_a_length_is_read_once() -> None:
    """The length of a message was read a second time, from the first bytes of its content."""
    bodies = [b"", b"x", bytes(range(256)), b"\0\0\0\5hello", b"y" * 5000]
    stream = b"".join(frames.encode(kind, body) for kind, body in enumerate(bodies, start=1))
    for step in (1, 3, 7, len(stream)):
        splitter, found = frames.Splitter(), []
        for start in range(0, len(stream), step):
            found += splitter.feed(stream[start : start + step])
        assert found == list(enumerate(bodies, start=1))


def objects_of_many_sizes() -> bool:
    world = shoal.world()
    sent = ["", b"", [], 5, b"\0\0\0\5hello", "x" * 100_000, {"a": torch.arange(3).tolist()}]
    for value in sent:
        world.send_object(value, dst=1) if world.rank == 0 else None
    received = [world.recv_object(src=0) for _ in sent] if world.rank == 1 else sent
    return received == sent


@pytest.mark.parametrize("backend", ["memory", "shm", "gloo"])
def test_p08_messages_of_any_length_in_a_row(backend: str) -> None:
    """One that is empty, or looks like a length itself, does not put the next ones out of step."""
    assert values(outcomes(objects_of_many_sizes, backend=backend, ranks=2)) == [True, True]


# P9 ---------------------------------------------------------------------------------------


def exact_values() -> tuple[bool, int]:
    """Whether values that no double can hold arrive as they are, and the bytes that moved."""
    world = shoal.world()
    is_exact = True
    large = torch.tensor([2**53 + 1, -(2**63), 2**63 - 1])
    weird = torch.tensor([0x7FA00001, -1, 1], dtype=torch.int32).view(torch.float32)
    half = torch.tensor([0x7F81, 0x0001], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for tensor in (large, weird, half):
        raw = tensor.view(torch.uint8)
        got = world.broadcast(tensor.clone() if world.rank == 0 else torch.empty_like(tensor))
        is_exact &= torch.equal(got.view(torch.uint8), raw)
        for part in world.all_gather(tensor).chunk(world.size):
            is_exact &= torch.equal(part.contiguous().view(torch.uint8), raw)
    world.backend.reset_stats()
    world.broadcast(torch.zeros(1000, dtype=torch.uint8))
    return is_exact, world.stats()["broadcast"].num_bytes


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p09_bytes_travel_as_they_are(backend: str, ranks: int) -> None:
    """Every element was turned into a double for the wire: slow, large, and wrong for integers."""
    assert values(outcomes(exact_values, backend=backend, ranks=ranks)) == [(True, 1000)] * ranks


# P10 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [world("memory", 2), world("shm", 2), world("gloo", 2), world("mpi", 2, full=True)],
)
def test_p10_what_is_installed_works(backend: str, ranks: int) -> None:
    """A native library was detected, and then the answer was "not implemented"."""
    results = values(outcomes(everything_is_global, backend=backend, ranks=ranks))
    assert {name for found in results for name in found} >= {
        "recv", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "scatter",
        "gather", "reduce",
    }  # fmt: skip


def test_p10_what_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never becomes another backend in silence."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r'pip install "shoal\[mpi\]"'):
        mpi_runtime.load(1.0)


# P24 --------------------------------------------------------------------------------------


def fail_between_barriers() -> None:
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        raise ValueError("between")
    world.barrier()


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p24_an_exception_between_two_barriers(backend: str, ranks: int) -> None:
    """The first barrier was passed by all, the second never by those who had not failed."""
    results = outcomes(fail_between_barriers, backend=backend, ranks=ranks, timeout=600)
    assert_all_blame(results, 1, "ValueError: between")


# P25 --------------------------------------------------------------------------------------


def part_ways() -> None:
    """On failure one rank goes to another meeting than those who succeeded."""
    world = shoal.world()
    world.barrier()
    if world.rank == 1:
        world.all_reduce(torch.zeros(1), "min")  # "somebody failed"
    world.all_reduce(torch.ones(1), "sum")  # "all is well"


def leave_on_either_path() -> str:
    with shoal.world() as world:
        world.barrier()
        if world.rank == 1:
            raise ValueError("the failure path")
    return "the path of success, which waits for nobody"


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p25_success_and_failure_never_wait_at_different_places(backend: str, ranks: int) -> None:
    """Ranks that failed waited at one barrier, ranks that succeeded at another."""
    results = outcomes(part_ways, backend=backend, ranks=ranks, timeout=600)
    assert all(isinstance(outcome.error, MismatchError) for outcome in results), results
    results = outcomes(leave_on_either_path, backend=backend, ranks=ranks, timeout=600)
    assert isinstance(results[1].error, ValueError)
    assert [o.value for o in results if o.rank != 1] == [
        "the path of success, which waits for nobody"
    ] * (ranks - 1)


# P26 --------------------------------------------------------------------------------------


def fail_while_regrouping() -> None:
    world = shoal.world()
    world.barrier()
    color: Any = world.rank % 2
    if world.rank == 1:
        color = object.__new__(Unpicklable)
    world.split(color)


class Unpicklable:
    """Nobody can send this."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


def fail_between_worlds() -> None:
    rank = shoal.world().rank
    shoal.world().shutdown()
    if rank == 1:
        raise RuntimeError("not coming back")
    with shoal.init("shm", timeout=600) as world:
        world.barrier()


@pytest.mark.parametrize(("backend", "ranks"), EACH)
def test_p26_an_error_during_a_change_of_members(backend: str, ranks: int) -> None:
    """One rank failed while workers were regrouped, and the others never learned of it."""
    results = outcomes(fail_while_regrouping, backend=backend, ranks=ranks, timeout=600)
    assert_all_blame(results, 1, "TypeError: cannot be sent")


def test_p26_an_error_between_two_worlds() -> None:
    """The same, between the end of one world and the beginning of the next."""
    results = outcomes(fail_between_worlds, backend="shm", ranks=3, timeout=600)
    assert str(results[1].error) == "not coming back"
    for rank in (0, 2):
        assert_blames(results[rank], 1)

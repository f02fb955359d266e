"""A rank fails before it has joined: the others do not wait for it until their deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import shoal
from faults.worlds import SOON_S, assert_blames, outcomes, site_of, world
from shoal.errors import DeadlineError, PeerError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.run import _run_processes, _settings, run_processes


def my_rank() -> int:
    return int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def refuse() -> None:
    raise ValueError("this cannot be unpickled")  # here


def exit_badly() -> None:
    os._exit(3)


def exit_well() -> None:
    os._exit(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Bomb:
    """An argument that does something to rank 1 when that rank takes it out of its wrapping."""

    def __init__(self, explode: Callable[[], None]) -> None:
        self._explode = explode

    def __reduce__(self) -> Any:
        return unwrap, (self._explode,)


def unwrap(explode: Callable[[], None]) -> str:
    if my_rank() == 1:
        explode()
    return "harmless"


def meet(bomb: Bomb) -> None:
    shoal.world().barrier()


@pytest.mark.parametrize(
    ("explode", "reason"),
    [
        (refuse, "this cannot be unpickled"),
        (exit_badly, "exit code 3"),
        (exit_well, "exit code 0"),
        (be_killed, "signal 9"),
    ],
)
@pytest.mark.parametrize(("backend", "ranks"), [world("shm", 3), world("gloo", 2)])
def test_the_others_are_told(
    backend: str, ranks: int, explode: Callable[[], None], reason: str
) -> None:
    begin = time.monotonic()
    results = outcomes(meet, Bomb(explode), backend=backend, ranks=ranks, timeout=600)
    assert time.monotonic() - begin < SOON_S
    assert results[1].failed
    for outcome in results:
        if outcome.rank != 1:
            assert_blames(outcome, 1, reason)
    if explode is refuse:
        assert str(results[1].error) == "this cannot be unpickled"
        assert site_of(refuse, "# here") in results[0].error.reason


@pytest.mark.mpi
@pytest.mark.full
def test_nobody_is_left_in_the_start_of_mpi() -> None:
    """Which waits for all ranks and cannot be interrupted: the caller ends the others."""
    begin = time.monotonic()
    results = outcomes(meet, Bomb(be_killed), backend="mpi", ranks=2, timeout=600)
    assert time.monotonic() - begin < 45
    assert all(outcome.failed for outcome in results)


def never_mind() -> None:
    """What a rank does that has joined."""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_never_comes_is_named_at_the_deadline(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three are started, and nobody knows what became of the third."""
    from shoal.launch.function import run

    monkeypatch.setattr(
        run,
        "run_processes",
        lambda fn, args, ranks, **options: start_all_but_one(fn, args, options),
    )
    # On a busy machine the two that are started may take seconds.
    results = _run_processes(never_mind, (), 3, _settings(3, backend, 8.0))
    for outcome in results:
        assert isinstance(outcome.error, DeadlineError | PeerError), outcome.traceback
        assert "rank 2 of 3 to join" in str(outcome.error)


def start_all_but_one(fn: Any, args: Any, options: Any) -> Any:
    return run_processes(fn, args, 2, **options)


def rejoin_with_trouble() -> str:
    first = shoal.world()
    first.barrier()
    first.shutdown()
    if my_rank() == 1:
        os._exit(5)
    with shoal.init("shm", timeout=600) as again:
        again.barrier()
    return "met again"


def test_a_rank_that_dies_between_two_worlds() -> None:
    begin = time.monotonic()
    results = outcomes(rejoin_with_trouble, backend="shm", ranks=3)
    assert time.monotonic() - begin < SOON_S
    for rank in (0, 2):
        assert_blames(results[rank], 1, "exit code 5")


def rejoin() -> list[int]:
    found = []
    shoal.world().shutdown()
    for _ in range(3):
        with shoal.init("shm", timeout=20) as world:
            found.append(sum(world.all_gather_object(world.rank)))
    return found


def test_one_world_after_another() -> None:
    results = outcomes(rejoin, backend="shm", ranks=3)
    assert [outcome.value for outcome in results] == [[3, 3, 3]] * 3


def test_the_caller_is_told_who_and_why() -> None:
    fork_server()
    with pytest.raises(ValueError, match="this cannot be unpickled") as caught:
        shoal.run(meet, 2, "shm", (Bomb(refuse),))
    assert any("raised on rank 1" in note for note in caught.value.__notes__)


def test_the_caller_is_told_of_a_silent_end() -> None:
    with pytest.raises(PeerError, match="exited with code 3") as caught:
        shoal.run(meet, 2, "shm", (Bomb(exit_badly),))
    assert caught.value.rank == 1

"""Worlds to break, and what must hold of the ranks that are left."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import leaks
import shoal
from shoal.comm.control import connect
from shoal.comm.control.sockets import topology
from shoal.errors import PeerError, ShoalError
from shoal.launch.function.outcome import Outcome
from shoal.launch.function.run import run_outcomes

TIMEOUT_S = 30.0
# A failure is news within milliseconds, a stop within two seconds: this is for a machine that has
# other things to do, and far from the timeout, which is what a missed failure would take.
SOON_S = 15.0


def world(backend: str, ranks: int, *, full: bool = False) -> Any:
    """A parameter for `backend, ranks`."""
    marks = [pytest.mark.mpi] if backend == "mpi" else []
    if full:
        marks.append(pytest.mark.full)
    return pytest.param(backend, ranks, marks=marks, id=f"{backend}-{ranks}")


def worlds(*backends: str, mpi: bool = True) -> list[Any]:
    """A world of each backend for every run, and more sizes of each for the full one."""
    usual = {"memory": 3, "shm": 3, "gloo": 2, "mpi": 2}
    params = []
    for backend in backends:
        for ranks in (2, 3) if backend == "mpi" else (2, 3, 4):
            is_usual = ranks == usual[backend] and (mpi or backend != "mpi")
            params.append(world(backend, ranks, full=not is_usual))
    return params


ALL = worlds("memory", "shm", "gloo", "mpi")
# Where starting MPI for one check more is worth it only in the full run.
MOST = worlds("memory", "shm", "gloo", "mpi", mpi=False)
PROCESSES = worlds("shm", "gloo", "mpi")
MOST_PROCESSES = worlds("shm", "gloo", "mpi", mpi=False)


def outcomes(
    fn: Callable[..., Any], *args: Any, backend: str, ranks: int, timeout: float = TIMEOUT_S
) -> list[Outcome]:
    """What became of each rank."""
    return run_outcomes(fn, args, ranks, backend, timeout)


def outcomes_between_hosts(fn: Callable[..., Any], *args: Any, ranks: int) -> list[Outcome]:
    """The same for ranks that take each other for strangers: control goes over sockets."""
    arguments = (fn, args, topology.ALL_PAIRS_RANKS)
    return run_outcomes(_run_on_a_host_of_its_own, arguments, ranks, "gloo", TIMEOUT_S)


def _run_on_a_host_of_its_own(fn: Callable[..., Any], args: Any, all_pairs_ranks: int) -> Any:
    topology.ALL_PAIRS_RANKS = all_pairs_ranks
    rank = shoal.world().rank
    shoal.world().shutdown()
    connect.host_id = lambda: f"host {rank}"
    with shoal.init("gloo", TIMEOUT_S):
        return fn(*args)


def values(results: Sequence[Outcome]) -> list[Any]:
    """What the ranks returned, none of which failed."""
    assert [outcome.traceback for outcome in results] == [""] * len(results)
    return [outcome.value for outcome in results]


def assert_all_blame(results: Sequence[Outcome], culprit: int, *words: str) -> None:
    """Every other rank raised a `PeerError` that names the culprit and its reason, in time."""
    for outcome in results:
        if outcome.rank != culprit:
            assert_blames(outcome, culprit, *words)
    assert_prompt(results)


def assert_blames(outcome: Outcome, culprit: int, *words: str) -> None:
    """The rank raised a `PeerError` that names the culprit and its reason."""
    error = outcome.error
    assert isinstance(error, PeerError), (outcome, outcome.traceback)
    assert error.rank == culprit, error
    for word in words:
        assert word in error.reason, error


def assert_prompt(results: Sequence[Outcome]) -> None:
    """All ranks that failed did so about the same time."""
    times = [outcome.failed_at for outcome in results if outcome.failed_at is not None]
    assert max(times) - min(times) < SOON_S


def site_of(fn: Callable[..., Any], text: str) -> str:
    """File and line of the line of a function that has a text in it."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [number for number, line in enumerate(lines) if text in line]
    return f"{fn.__code__.co_filename}:{first + offset}"


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Notes on an error of shoal's how many seconds the block had taken."""
    begin = time.monotonic()
    try:
        yield
    except ShoalError as error:
        error.seconds = time.monotonic() - begin  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def warnings_of_shoal() -> Iterator[list[str]]:
    """What shoal logs meanwhile."""
    messages: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    keeper = Keeper()
    logger = logging.getLogger("shoal")
    logger.addHandler(keeper)
    try:
        yield messages
    finally:
        logger.removeHandler(keeper)


def all_pids() -> list[int]:
    """The processes of all ranks; all of them call it."""
    return shoal.world().all_gather_object(os.getpid())


def kill(pid: int) -> None:
    """With -9, as the kernel does when memory runs out."""
    with contextlib.suppress(ProcessLookupError):  # the launcher of a stopped rank may be first
        os.kill(pid, signal.SIGKILL)


def memfds_of_shoal() -> list[str]:
    """Anonymous files of shoal that this test run's processes hold."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) != os.getpid() and not leaks._is_descendant(pid):
            continue
        with contextlib.suppress(OSError):
            found += [
                f"{pid}: {target}"
                for link in Path(f"/proc/{pid}/fd").iterdir()
                if "memfd:shoal-" in (target := os.readlink(link))
            ]
    return found


def still_running(pids: Sequence[int | str]) -> list[int | str]:
    """Which processes have not ended; those that are about to get a moment."""
    deadline = time.monotonic() + SOON_S
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return running


def _runs(pid: int | str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False

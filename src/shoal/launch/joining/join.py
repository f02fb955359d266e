"""Joins the world that this process's environment speaks of, and leaves it at the end.

No other rank may be left waiting for a process that has ended, however it came to that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from functools import cache
from types import TracebackType

from shoal.comm.backend import Backend
from shoal.comm.bootstrap.bootstrap import AloneBootstrap, Bootstrap
from shoal.comm.bootstrap.connect import NAMES, connect_backend
from shoal.comm.control.page.control import is_supported
from shoal.comm.memory.backend import InMemoryBackend
from shoal.comm.world import World, find_current
from shoal.errors import BackendUnavailableError, LaunchError, MismatchError
from shoal.launch.joining.environment import RankInfo, discover
from shoal.launch.joining.exits import (
    leave_record,
    leave_record_of_exit,
    note_exits,
    noted_exit,
)
from shoal.launch.joining.meet import meet, report
from shoal.launch.joining.process_membership import (
    ProcessMembership,
    end_membership,
    fail_membership,
    is_elastic,
)
from shoal.system.site import describe

_MPI_SOURCES = ("openmpi", "pmi")


def join(name: str, timeout: float, *, on_cpu: bool = False) -> World:
    """The world over that backend ("auto" to choose), joined by all ranks of the environment.

    ``on_cpu``: what it has to carry is known to be on the CPU.
    """
    check_name(name)
    info = discover()
    if name == "auto":
        name = os.environ.get("SHOAL_BACKEND") or "auto"
        check_name(name)
    if name == "auto":
        name = choose(info, on_cpu=on_cpu)
    if is_elastic():
        return ProcessMembership(name, timeout).first_world()
    if name == "memory":
        return World(_alone(info, timeout))
    return World(connect_backend(name, _bootstrap(name, info, timeout), timeout))


def check_name(name: str) -> None:
    """Refuses a backend that does not exist, and a system that has none."""
    if sys.platform == "win32":
        raise BackendUnavailableError(
            "shoal does not run on Windows: use Linux, or Linux under WSL 2 (macOS works as far "
            "as backend='memory' and 'gloo' go)"
        )
    if name not in (*NAMES, "auto"):
        raise ValueError(f"backend must be one of {', '.join(NAMES)} or auto; got {name!r}")


def choose(info: RankInfo, *, on_cpu: bool = False) -> str:
    """NCCL with a GPU for every rank; else MPI under mpirun, shared memory on one host, Gloo."""
    import torch

    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= info.local_size
    if has_gpus and not on_cpu:
        return "nccl"
    if info.source in _MPI_SOURCES:
        return "mpi"
    return choose_for_cpu(is_one_host=info.local_size == info.size)


def choose_for_cpu(*, is_one_host: bool) -> str:
    """Shared memory where it works, else Gloo."""
    return "shm" if is_one_host and is_supported() else "gloo"


def _alone(info: RankInfo, timeout: float) -> Backend:
    if info.size > 1:
        raise LaunchError(
            f"backend='memory' lives in one process, and this is rank {info.rank} of {info.size} "
            "processes: use shoal.run(fn, ranks=..., backend='memory'), or another backend here."
        )
    return InMemoryBackend.alone(timeout)


def _bootstrap(name: str, info: RankInfo, timeout: float) -> Bootstrap:
    if name == "mpi" or (info.source in _MPI_SOURCES and info.master_addr is None):
        from shoal.comm.mpi.bootstrap import MPIBootstrap

        return MPIBootstrap(timeout)
    if info.size == 1:
        return AloneBootstrap(timeout)
    return meet(info, timeout)


def report_absence(name: str, error: BaseException) -> None:
    """Tells the others why this rank will not join; where there is no server, its end has to do."""
    info = discover()
    if name == "mpi" or info.size == 1 or is_elastic():
        return  # of the end of an elastic rank its launcher tells
    with contextlib.suppress(Exception):  # the rank has a better error to show than this one's
        report(info, describe(error))


@cache
def watch_exit() -> None:
    """Has an uncaught exception reach all ranks, and a normal end count as leaving."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = find_current()
        if world is not None:
            world.fail(error.with_traceback(trace))
        fail_membership()
        leave_record(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    note_exits()
    atexit.register(_leave_world)


def _leave_world() -> None:
    world, noted = find_current(), noted_exit()
    if noted is not None and noted.code:
        leave_record_of_exit(noted)
        fail_membership()
    if world is not None and noted is not None:
        world.backend.part_by(noted.text)
    try:
        if world is not None:
            world.shutdown()
        end_membership()
    except MismatchError as error:  # at this point an exception would not change the exit code
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

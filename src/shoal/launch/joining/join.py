"""Joins the world that this process's environment speaks of, and leaves it at the end.

No other rank may be left waiting for a process that has ended, however it came to that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from shoal.comm.backend import Backend
from shoal.comm.bootstrap.connect import NAMES, connect_backend
from shoal.comm.bootstrap.store import Bootstrap, StoreBootstrap, host_store, report_failure
from shoal.comm.control.page.control import is_supported
from shoal.comm.memory.backend import InMemoryBackend
from shoal.comm.world import find_current
from shoal.errors import BackendUnavailableError, LaunchError, MismatchError, PeerError
from shoal.launch.joining.environment import RankInfo, discover
from shoal.system.site import describe
from shoal.torch_internals.process_groups import default_store

if TYPE_CHECKING:
    from torch.distributed import Store

_REPORT_S = 5.0
_MPI_SOURCES = ("openmpi", "pmi")
# Worlds of one process after another: each has keys of its own in a store they share.
_generation = 0


def join(name: str, timeout: float, *, on_cpu: bool = False) -> Backend:
    """The backend of that name ("auto" to choose), joined by all ranks of the environment.

    ``on_cpu``: what it has to carry is known to be on the CPU.
    """
    check_name(name)
    info = discover()
    if name == "auto":
        name = os.environ.get("SHOAL_BACKEND") or "auto"
        check_name(name)
    if name == "auto":
        name = choose(info, on_cpu=on_cpu)
    if name == "memory":
        return _alone(info, timeout)
    return connect_backend(name, _bootstrap(name, info, timeout), timeout)


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
    store, holds_store = _base_store(info, timeout)
    news = news_of_run(store)
    return StoreBootstrap(
        _fresh(news), info.rank, info.size, timeout, holds_store=holds_store, news=news
    )


def news_of_run(store: Store, run: str | None = None) -> Store:
    """The store under a prefix that only this run uses, for all its worlds."""
    import torch.distributed as dist

    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = run or os.environ.get("SHOAL_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "run")
    return dist.PrefixStore(f"shoal/{run}/{restart}", store)


def _fresh(store: Store) -> Store:
    """The store under a prefix that no earlier world used."""
    global _generation
    import torch.distributed as dist

    _generation += 1
    return dist.PrefixStore(str(_generation), store)


def report_absence(name: str, error: BaseException) -> None:
    """Tells the others why this rank will not join; without a store, its end has to do."""
    info = discover()
    if name == "mpi" or info.size == 1:
        return
    with contextlib.suppress(Exception):  # the rank has a better error to show than this one's
        store, _ = _base_store(info, _REPORT_S)
        report_failure(news_of_run(store), info.rank, describe(error))


def _base_store(info: RankInfo, timeout: float) -> tuple[Store, bool]:
    """The store the ranks meet at, and whether it lives in this process."""
    import torch.distributed as dist

    if dist.is_initialized():
        return default_store(), False
    if info.size == 1 and info.master_addr is None:
        return dist.HashStore(), True
    if info.master_addr is None or info.master_port is None:
        raise LaunchError(
            f"rank {info.rank} of {info.size} ({info.source}) does not know where to meet the "
            "others: set MASTER_ADDR and MASTER_PORT, or start the ranks with shoal launch."
        )
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    is_master = info.rank == 0 and not has_agent
    store = _tcp_store(info.master_addr, info.master_port, timeout, is_master)
    return store, is_master


def _tcp_store(host: str, port: int, timeout: float, is_master: bool) -> Store:
    """A client of the launcher's store, or rank 0 holds it where the launcher has none."""
    from torch.distributed import TCPStore

    wait = timedelta(seconds=timeout)
    if is_master and host in ("127.0.0.1", "localhost"):  # else it would listen everywhere
        return host_store("127.0.0.1", port, timeout)[0]
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=wait)


@cache
def watch_exit() -> None:
    """Has an uncaught exception reach all ranks, and a normal end count as leaving."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = find_current()
        if world is not None:
            world.fail(error.with_traceback(trace))
        _leave_record(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_leave_world)


def _leave_world() -> None:
    world = find_current()
    if world is None:
        return
    try:
        world.shutdown()
    except MismatchError as error:  # at this point an exception would not change the exit code
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _leave_record(error: BaseException) -> None:
    folder = os.environ.get("SHOAL_ERROR_DIR")
    if folder is None:
        return
    rank = discover().rank
    record = {
        "rank": rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "primary": not isinstance(error, PeerError),
    }
    try:
        with open(os.path.join(folder, f"rank-{rank}.json"), "w") as file:
            json.dump(record, file)
    except OSError as problem:
        print(f"shoal: cannot leave a record of the failure: {problem}", file=sys.stderr)

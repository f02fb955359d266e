"""The MPI library in this process: loaded late, started with a deadline, ended only if all is well.

[Note: one lock]
Several threads of a rank make MPI calls: the caller's, the worker of asynchronous operations, one
for each message. They take turns under `LOCK`, so a library that serializes no calls itself will
do. No call made under the lock waits for another rank.

[Note: the end of MPI]
`MPI_Finalize` waits for every rank, and nothing can interrupt it. So it is called only when this
rank saw no failure and all others have come to their end too. If a rank failed, the process ends
without it. Where the user imported mpi4py first, mpi4py calls it at the very end of the process and
cannot be told not to: then the process ends just before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shoal.errors import BackendUnavailableError
from shoal.system import deadline

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("shoal")

LOCK = threading.Lock()
_LONGEST_PAUSE_S = 5e-3
_SEGMENTS = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")
# MPI may still write into the buffers of a request that no thread waits for any more, at any time
# until the process ends; a request cannot be taken back once its peer is dead.
_abandoned: list[Any] = []
_shared: list[MPI.Comm] = []


class _MPIEnding:
    """What decides how this process leaves MPI."""

    has_failed = False
    timeout = 0.0
    pids: Sequence[int] = ()


def load(timeout: float) -> ModuleType:
    """The module `mpi4py.MPI` with MPI started; every rank of the job must come here.

    Raises:
        BackendUnavailableError: If mpi4py or MPI is missing or of no use.
        DeadlineError: If MPI did not start in time, because some rank did not start it.
    """
    module = _import()
    _MPIEnding.timeout = timeout
    if module.Is_finalized():
        raise BackendUnavailableError(
            "MPI was finalized in this process and cannot be started again: "
            "do not call MPI.Finalize() before the last world ends"
        )
    if not module.Is_initialized():
        _start(module, timeout)
    _check_threads(module)
    _prepare(module)
    return module


def _import() -> ModuleType:
    if importlib.util.find_spec("mpi4py") is None:
        raise BackendUnavailableError(_missing("the Python package mpi4py is not installed"))
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # it found no library to load
        raise BackendUnavailableError(_missing(f"mpi4py found no MPI library: {error}")) from error
    return MPI


def _missing(what: str) -> str:
    return f"backend='mpi' cannot run: {what}. Install both with: pip install \"shoal[mpi]\""


def _start(module: ModuleType, timeout: float) -> None:
    """Starts MPI in a thread: it waits for all ranks, and would keep Python's own lock too."""
    library = ctypes.CDLL(module.__file__)
    provided = ctypes.c_int()
    arguments = (None, None, module.THREAD_MULTIPLE, ctypes.byref(provided))
    thread = threading.Thread(target=library.MPI_Init_thread, args=arguments, daemon=True)
    thread.start()
    limit = deadline.Deadline(timeout)
    while thread.is_alive():
        limit.enforce(deadline.start_text, "MPI")
        thread.join(_LONGEST_PAUSE_S)
    module.COMM_WORLD.Set_errhandler(module.ERRORS_RETURN)


@cache
def _prepare(module: ModuleType) -> None:
    """What is done once for the process: see [Note: the end of MPI]."""
    atexit.register(finalize)
    # MPICH's mpiexec tells the survivors of a death by a signal that would kill them.
    is_main = threading.current_thread() is threading.main_thread()
    is_deadly = is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if is_deadly and module.get_vendor()[0] != "Open MPI":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _check_threads(module: ModuleType) -> None:
    if module.Query_thread() < module.THREAD_SERIALIZED:
        raise BackendUnavailableError(
            "backend='mpi' calls MPI from several threads, one at a time, and MPI was started "
            "with less than MPI_THREAD_SERIALIZED. Start it with MPI.Init_thread(), or leave it "
            "to shoal; if neither helps, this MPI was built without support for threads."
        )


def shared_comm() -> MPI.Comm | None:
    """The communicator of all worlds of an elastic run, once there is one."""
    return _shared[0] if _shared else None


def share_comm(comm: MPI.Comm) -> None:
    """All worlds of this process have that communicator from now on."""
    _shared[:] = [comm]


def unlink_segments() -> None:
    """Unlinks the library's shared memory, which all ranks of this host have mapped by now.

    The library does so in `MPI_Finalize`, and ranks that fail or are killed never come there.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
        for path in paths:
            if path.startswith(_SEGMENTS):
                with contextlib.suppress(OSError):  # another rank was first
                    os.unlink(path)


def watch(pids: Sequence[int]) -> None:
    """All ranks are these processes of this host; the end of one is the end of all."""
    _MPIEnding.pids = pids


def keep(*things: Any) -> None:
    """Keeps requests and their buffers for ever, because no thread will wait for them."""
    _abandoned.append(things)
    _MPIEnding.has_failed = True


def mark_failed() -> None:
    """A rank failed: from now on, ending MPI could take for ever."""
    _MPIEnding.has_failed = True


def finalize() -> None:
    """Ends MPI if nothing failed; for the very end of the process.

    See [Note: the end of MPI].
    """
    import mpi4py
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    # An uncaught exception is a failure as well: the others must not have to wait for it.
    has_failed = _MPIEnding.has_failed or getattr(sys, "last_value", None) is not None
    is_ours = mpi4py.rc.finalize is False
    if has_failed and not is_ours:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if is_ours and not has_failed and _all_at_end(MPI.COMM_WORLD):
        MPI.Finalize()


def _all_at_end(world: MPI.Comm) -> bool:
    try:
        with LOCK:
            request = world.Ibarrier()
        is_done = _await_end(request)
    except Exception as error:  # the library noticed a death
        logger.warning("leaving MPI without MPI_Finalize: %s", error)
        return False
    if not is_done:
        keep(request)
        logger.warning("leaving MPI without MPI_Finalize: another rank did not come to its end")
    return is_done


def _await_end(request: MPI.Request) -> bool:
    end = time.monotonic() + _MPIEnding.timeout
    for pause in pauses():
        is_over = time.monotonic() > end or any(map(_is_gone, _MPIEnding.pids))
        with LOCK:
            if request.Test():
                return True
        if is_over:
            return False
        time.sleep(pause)
    raise AssertionError("the pauses never end")


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] in (b"Z", b"X")
    except OSError:
        return True


def pauses() -> Iterator[float]:
    """How long to sleep between looks at MPI, which makes progress only while it is called."""
    return deadline.pauses(1e-4, _LONGEST_PAUSE_S)

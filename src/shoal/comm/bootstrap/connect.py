"""From a name and a bootstrap to a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.backend import Backend, WorldState
from shoal.comm.bootstrap.store import Bootstrap, connect
from shoal.errors import BackendUnavailableError

if TYPE_CHECKING:
    from shoal.comm.shm.backend import SharedMemoryBackend

NAMES = ("memory", "shm", "gloo", "nccl", "mpi")


def connect_backend(name: str, bootstrap: Bootstrap, timeout: float) -> Backend:
    """The world's backend on this rank; every rank of the world calls this."""
    connectors = {"shm": connect_shared_memory, "gloo": _gloo, "nccl": _nccl, "mpi": _mpi}
    state = WorldState(timeout=timeout, close_bootstrap=bootstrap.close)
    backend = connectors[name](bootstrap, state)
    bootstrap.joined()
    return backend


def connect_shared_memory(bootstrap: Bootstrap, state: WorldState) -> SharedMemoryBackend:
    """Ranks of one host over shared memory."""
    from shoal.comm.control.page.control import PageControl, check_platform
    from shoal.comm.shm.backend import SharedMemoryBackend
    from shoal.comm.shm.segments import Arena, Peer

    check_platform()
    control = connect(bootstrap, reads_memory=True)
    if not isinstance(control, PageControl):
        control.close()
        raise BackendUnavailableError(
            "backend='shm' needs all ranks on one host, as one user; these are spread over "
            "several. Use backend='gloo', 'nccl' or 'mpi'."
        )
    ranks = range(bootstrap.size)
    peers = [Peer(pid) for pid in control.pids]
    return SharedMemoryBackend(state, control, control.channel(0, ranks), ranks, Arena(), peers)


def _gloo(bootstrap: Bootstrap, state: WorldState) -> Backend:
    from shoal.comm.torch_groups.gloo import connect_gloo

    return connect_gloo(bootstrap, state)


def _nccl(bootstrap: Bootstrap, state: WorldState) -> Backend:
    from shoal.comm.torch_groups.nccl import connect_nccl

    return connect_nccl(bootstrap, state)


def _mpi(bootstrap: Bootstrap, state: WorldState) -> Backend:
    from shoal.comm.mpi.backend import connect_mpi

    return connect_mpi(bootstrap, state)

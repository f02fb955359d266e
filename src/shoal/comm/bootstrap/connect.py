"""From a name and a bootstrap to a backend."""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.backend import Backend, WorldState
from shoal.comm.bootstrap.store import Bootstrap
from shoal.comm.mpi.backend import connect_mpi
from shoal.comm.shm.backend import connect_shm
from shoal.comm.torch_groups.gloo import connect_gloo
from shoal.comm.torch_groups.nccl import connect_nccl

_CONNECTORS: dict[str, Callable[[Bootstrap, WorldState], Backend]] = {
    "shm": connect_shm,
    "gloo": connect_gloo,
    "nccl": connect_nccl,
    "mpi": connect_mpi,
}
NAMES = ("memory", *_CONNECTORS)


def connect_backend(name: str, bootstrap: Bootstrap, timeout: float) -> Backend:
    """The world's backend on this rank; every rank of the world calls this."""
    state = WorldState(timeout=timeout, close_bootstrap=bootstrap.close)
    backend = _CONNECTORS[name](bootstrap, state)
    bootstrap.joined()
    return backend

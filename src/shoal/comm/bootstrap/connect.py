"""From a name and a bootstrap to a backend."""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.backend import Backend
from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.mpi.backend import connect_mpi
from shoal.comm.shm.backend import connect_shm
from shoal.comm.torch_groups.gloo import connect_gloo
from shoal.comm.torch_groups.nccl import connect_nccl
from shoal.comm.world_state import WorldState
from shoal.errors import MismatchError
from shoal.system.rank_names import name_spans
from shoal.system.site import describe

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
    try:
        _agree_on_backend(name, bootstrap)
        backend = _CONNECTORS[name](bootstrap, state)
        bootstrap.joined()
    except BaseException as error:
        bootstrap.abandon(describe(error))
        raise
    return backend


def _agree_on_backend(name: str, bootstrap: Bootstrap) -> None:
    """Ranks of different backends would wait for each other in different places."""
    asked: dict[str, list[int]] = {}
    for rank, data in enumerate(bootstrap.all_gather(name.encode())):
        asked.setdefault(data.decode(), []).append(rank)
    if len(asked) > 1:
        who = ", ".join(f"{name_spans(ranks)} for {each}" for each, ranks in asked.items())
        raise MismatchError(
            f"ranks asked for different backends: {who}. Give shoal.init the same backend, and "
            "SHOAL_BACKEND the same value, on every rank."
        )

"""More worlds between the ranks of a run, so that contenders can live in the same processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shoal.comm import Backend
from shoal.comm.bootstrap.connect import connect_backend
from shoal.comm.bootstrap.store import StoreBootstrap, store_for_one_host

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Venue:
    """Where the contenders of one run meet; torch's default group, over Gloo, is there too."""

    shm: Backend
    gloo: Backend

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.shm.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.shm.size

    @staticmethod
    def open(shm: Backend, stack: contextlib.ExitStack) -> Venue:
        """Every rank of a world over shared memory calls this; the stack ends what it began."""
        fresh = stores(shm)
        gloo = stack.enter_context(connect("gloo", next(fresh), shm))
        join_torch(next(fresh), shm, stack)
        return Venue(shm, gloo)


def stores(world: Backend) -> Iterator[dist.Store]:
    """Stores that nobody used before, all on one server at rank 0."""
    if world.rank == 0:
        store, port = store_for_one_host()
        world.broadcast_object(port)
    else:
        port = world.broadcast_object()
        wait = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
    for number in range(3):
        yield dist.PrefixStore(f"world-{number}", store)


def connect(name: str, store: dist.Store, world: Backend) -> Backend:
    """A backend of another kind between the same ranks."""
    bootstrap = StoreBootstrap(store, world.rank, world.size, TIMEOUT_S)
    return connect_backend(name, bootstrap, TIMEOUT_S)


def join_torch(store: dist.Store, world: Backend, stack: contextlib.ExitStack) -> None:
    """Makes torch's default group, over Gloo.

    A backend that is connected after this would use torch's group instead of one of its own.
    """
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    stack.callback(dist.destroy_process_group)

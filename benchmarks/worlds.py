"""More worlds between the ranks of a run, so that contenders can live in the same processes."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

import torch.distributed as dist

from shoal.comm import Backend
from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.bootstrap.connect import connect_backend

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
        gloo = stack.enter_context(connect("gloo", shm))
        join_torch(stack)
        return Venue(shm, gloo)


class InnerBootstrap(Bootstrap):
    """Between ranks that have a world already, for another one inside it."""

    def __init__(self, world: Backend) -> None:
        self.rank, self.size, self.timeout = world.rank, world.size, TIMEOUT_S
        self._world = world
        self.secret = world.broadcast_object(secrets.token_bytes(32))

    def all_gather(self, data: bytes) -> list[bytes]:
        """Over the world."""
        return list(self._world.all_gather_object(data))


def connect(name: str, world: Backend) -> Backend:
    """A backend of another kind between the same ranks."""
    return connect_backend(name, InnerBootstrap(world), TIMEOUT_S)


def join_torch(stack: contextlib.ExitStack) -> None:
    """Makes torch's default group, over Gloo, at the master that `shoal.run` names."""
    dist.init_process_group("gloo")
    stack.callback(dist.destroy_process_group)

"""How the ranks of an MPI job find each other."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.comm.bootstrap.bootstrap import Bootstrap, warn_of_strangers
from shoal.comm.control.connect import host_id
from shoal.comm.mpi import runtime
from shoal.errors import DeadlineError
from shoal.meeting.client import MeetingClient
from shoal.meeting.handshake import TOKEN_VARIABLE
from shoal.meeting.server import MeetingServer, secret_of
from shoal.system.deadline import Deadline, joining_text

if TYPE_CHECKING:
    from mpi4py import MPI

# The last tag that MPI guarantees; the backend uses those before it.
BOOTSTRAP_TAG = 32767


class MPIBootstrap(Bootstrap):
    """The first words between the ranks of an MPI job, over MPI itself."""

    def __init__(self, timeout: float) -> None:
        """Starts MPI; every rank of the job must do so."""
        self._mpi = runtime.load(timeout)
        self._world: MPI.Comm = self._mpi.COMM_WORLD
        self.rank, self.size, self.timeout = self._world.rank, self._world.size, timeout
        self.secret = agree_on_secret(self)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Each rank sends its bytes to all others, and waits for theirs."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with runtime.LOCK:
            open_ = {rank: [self._world.Isend(data, rank, BOOTSTRAP_TAG)] for rank in others}
        found: dict[int, bytes | bytearray] = {self.rank: data}
        self._await(lambda: [r for r in others if not self._is_through(r, found, open_[r])])
        return [bytes(found[rank]) for rank in range(self.size)]

    def _await(self, missing: Callable[[], list[int]]) -> None:
        deadline = Deadline(self.timeout)
        question = "Do all ranks of the MPI job call shoal.init()?"
        try:
            for pause in runtime.pauses():
                if not missing():
                    return
                deadline.enforce(joining_text, self.rank, self.size, missing, question)
                time.sleep(pause)
        except DeadlineError:
            runtime.keep(missing)  # and with it the requests and their buffers
            raise

    def joined(self) -> None:
        """All have heard from all, so each has mapped what it shares with the others."""
        runtime.unlink_segments()

    def _is_through(
        self, rank: int, found: dict[int, bytes | bytearray], requests: list[MPI.Request]
    ) -> bool:
        """Whether our bytes have gone to a rank and its own have come."""
        with runtime.LOCK:
            if rank not in found:
                status = self._mpi.Status()
                message = self._world.Improbe(rank, BOOTSTRAP_TAG, status)
                if message is None:
                    return False
                found[rank] = bytearray(status.Get_count(self._mpi.BYTE))
                requests.append(message.Irecv(found[rank]))
            return all(request.Test() for request in requests)


def agree_on_secret(bootstrap: Bootstrap) -> bytes | None:
    """What only the ranks know; None between hosts without a token.

    On one host MPI carries only the name of a unix socket, whose other end the kernel knows: the
    secret comes over that. Between hosts MPI carries a random number, and the token is added.
    """
    with contextlib.ExitStack() as stack:
        mine = {"host": host_id(), "address": "", "nonce": secrets.token_hex(32)}
        if bootstrap.rank == 0:
            mine["address"] = stack.enter_context(MeetingServer.on_one_host()).address
        everybody = [json.loads(data) for data in bootstrap.all_gather(json.dumps(mine).encode())]
        if len({each["host"] for each in everybody}) > 1:
            secret = secret_of(os.environ.get(TOKEN_VARIABLE, ""), everybody[0]["nonce"])
            if secret is None:
                warn_of_strangers()
            return secret
        client = stack.enter_context(contextlib.closing(MeetingClient(everybody[0]["address"])))
        bootstrap.all_gather(b"")  # rank 0 keeps the socket until all have the secret
        return client.secret

"""How ranks that do not know each other yet exchange a few bytes."""

from __future__ import annotations

import base64
import hmac
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

from shoal.errors import DeadlineError, LaunchError, PeerError
from shoal.meeting.client import MeetingClient, NotThereYet
from shoal.meeting.handshake import TOKEN_VARIABLE
from shoal.meeting.server import MeetingServer
from shoal.system.deadline import Deadline, joining_text, pauses

logger = logging.getLogger("shoal")

_LINGER_S = 5.0
_LOOK_EVERY_S = 0.5
_ANSWER_S = 10.0
_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
# A name server that does not answer may do so in a moment; a name that is wrong stays wrong.
_UNKNOWN_HOST_S = 5.0


class Bootstrap(ABC):
    """A slow way to exchange a few bytes, from which the control plane is made."""

    rank: int
    size: int
    timeout: float
    host: str | None = None
    """Where the ranks meet, if that is on the network."""
    secret: bytes | None = None
    """What only the ranks of this world know. None: anybody on the network may be among them."""

    is_elastic: bool = False
    """Whether the others may go on without a rank that is gone."""
    generation: int = 0
    """The number of the world, where there may be several one after the other."""

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank; raises at the deadline, naming who is missing."""

    def joined(self) -> None:
        """This rank is part of the world now."""

    def close(self) -> None:
        """This rank leaves. What others still need to join must outlast that."""

    def abandon(self, reason: str) -> None:
        """This rank cannot join."""


class AloneBootstrap(Bootstrap):
    """Of a world of one rank."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.size, self.timeout = 0, 1, timeout
        self.secret = secrets.token_bytes(32)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Its own."""
        return [data]


class MeetingBootstrap(Bootstrap):
    """Over the server where the ranks of a run meet, which may live in this process."""

    def __init__(
        self,
        client: MeetingClient,
        position: tuple[int, int],
        timeout: float,
        generation: int = 1,
        server: MeetingServer | None = None,
    ) -> None:
        """``position`` is rank and size; ``generation`` is new for each world of the run.

        ``server`` is for this world alone: it ends with the bootstrap.
        """
        (self.rank, self.size), self.timeout = position, timeout
        self.host = client.host
        self._client, self._server, self.generation = client, server, generation
        self._round = 0
        if client.secret is not None:
            self.secret = world_secret(client.secret, generation)
        else:
            warn_of_strangers()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Brings ours and waits for those of the others."""
        self._round += 1
        self._client.tell(
            {
                "kind": "gather",
                "generation": self.generation,
                "round": self._round,
                "rank": self.rank,
                "size": self.size,
                "process": _this_process(),
                "data": base64.b64encode(data).decode(),
            }
        )
        reply = self._await()
        if "failure" in reply:
            rank, reason = reply["failure"]["rank"], reply["failure"]["reason"]
            raise PeerError(rank, reason, "shoal.init, waiting for all to join")
        if "error" in reply:
            raise LaunchError(f"rank {self.rank} cannot join: {reply['error']}.")
        return [base64.b64decode(each) for each in reply["gathered"]]

    def joined(self) -> None:
        """Counts this rank, for the rank that holds the server."""
        joined = {"generation": self.generation, "rank": self.rank, "size": self.size}
        self._client.tell({"kind": "joined", **joined})
        self._client.close()

    def close(self) -> None:
        """Keeps a server that lives in this process until all ranks have joined."""
        if self._server is not None:
            self._server.await_joined(self.generation, self.size, _LINGER_S)
            self._server.close()

    def abandon(self, reason: str) -> None:
        """Tells those who wait, if they wait here."""
        self._client.close()
        if self._server is not None:
            self._server.report_failure(self.rank, reason)
            self._server.close()

    def _await(self) -> Any:
        deadline = Deadline(self.timeout)
        question = "Are they all started, and do they meet at the same place?"
        while (reply := self._client.reply(min(_LOOK_EVERY_S, self.timeout / 4))) is None:
            deadline.enforce(joining_text, self.rank, self.size, self._missing, question)
        return reply

    def _missing(self) -> list[int]:
        self._client.tell({"kind": "missing", "generation": self.generation, "round": self._round})
        reply = self._client.reply(_ANSWER_S, "missing")
        return [] if reply is None else list(reply["missing"])


def _this_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


def world_secret(secret: bytes, generation: int) -> bytes:
    """Of one world of a run, so that nothing said in one counts in another."""
    return hmac.digest(secret, b"world %d" % generation, "sha256")


def find_server(
    address: str, rank: int, size: int, timeout: float, generation: int
) -> MeetingClient:
    """Connects to the server, which may not be there yet.

    Raises:
        LaunchError: If nobody knows its host for a while: in a cluster a name may take a moment.
        DeadlineError: If it does not come.
    """
    deadline, trouble = Deadline(timeout), NotThereYet("")
    known_at = time.monotonic()
    for pause in pauses(_POLL_S, _LONGEST_POLL_S):
        try:
            return MeetingClient(address, generation)
        except NotThereYet as error:
            trouble = error
        if not trouble.is_unknown_host:
            known_at = time.monotonic()
        elif time.monotonic() - known_at >= _UNKNOWN_HOST_S:
            raise LaunchError(
                f"rank {rank} cannot find the host where the ranks meet: its name does not resolve "
                f"({trouble}). Give an address or a name that every host knows as --master or "
                "MASTER_ADDR."
            ) from None
        try:
            deadline.enforce(joining_text, rank, size, lambda: [0], "Has it been started?")
        except DeadlineError as error:
            raise DeadlineError(f"{error} ({trouble})") from None
        time.sleep(pause)
    raise AssertionError("pauses have no end")


@cache
def warn_of_strangers() -> None:
    """Once in a process: a world between hosts without a token."""
    logger.warning(
        "this world spans hosts and has no %s: whoever reaches its ports can read and change what "
        "ranks send each other, and objects that need pickle are refused. Set it to the same "
        "secret on every host.",
        TOKEN_VARIABLE,
    )

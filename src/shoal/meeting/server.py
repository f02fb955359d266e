"""The server where the ranks of a run meet: it gathers what each rank has to say, round by round.

[Note: who may come in]
On one host the kernel tells the user at the other end: another user's connection is closed before a
byte of it is read. Between hosts a guest proves that it knows ``SHOAL_TOKEN``, and so does the
server. Until it has, a connection may send a hundred bytes and last five seconds, and only so many
may be open. Whoever is in is one of the run's own processes, and is trusted.

On one host each guest is given the run's secret. Between hosts the secret is made of the token and
a random number of the server's, so it never travels. Without a token there is no secret.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from typing import Any

from shoal.meeting import address as places
from shoal.meeting.handshake import make_key
from shoal.meeting.roster import Roster
from shoal.meeting.roster_desk import RosterDesk
from shoal.meeting.rounds import GatherRound
from shoal.meeting.server_thread import Guest, ServerThread

# The guest's number in the handshake is above the server's, which is 0.
GUEST, SERVER, _NUM_SIDES = 1, 0, 2


def token_key(token: str) -> bytes:
    """What both sides prove to know; without a token only that they speak shoal's language."""
    return make_key("meeting", token)


def secret_of(token: str, nonce: str) -> bytes | None:
    """The secret of a run between hosts."""
    if not token:
        return None
    return hmac.digest(token_key(token), b"secret of run " + nonce.encode(), "sha256")


class MeetingServer(ServerThread):
    """A thread that serves the ranks of one run, and ends with `close`.

    Example:
        >>> with MeetingServer.on_one_host() as server:
        ...     start_ranks({"SHOAL_MEETING": server.address})
    """

    def __init__(
        self, listener: socket.socket, address: str, token: str | None, generation: int = 0
    ) -> None:
        """``token`` is None on one host. ``generation`` is the only one served, or 0 for all."""
        super().__init__(listener, address, "at the place where ranks meet")
        self._generation = generation
        self._nonce = secrets.token_hex(32)
        self._rounds: dict[tuple[int, int], GatherRound] = {}
        self._complete: dict[tuple[int, int], GatherRound] = {}
        self._failure: dict[str, Any] | None = None
        self._broken: tuple[int, dict[str, Any]] | None = None
        self.desk: RosterDesk | None = None
        self._joined: dict[int, set[int]] = {}
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        key = None if token is None else token_key(token)
        self._start("shoal-meeting", key, SERVER, _NUM_SIDES)

    @classmethod
    def on_one_host(cls, address: str | None = None, generation: int = 0) -> MeetingServer:
        """At a unix address, by default one that nobody can guess."""
        address = address or places.unix_address(secrets.token_hex(16))
        return cls(places.listen_unix(address), address, None, generation)

    @classmethod
    def between_hosts(
        cls, listener: socket.socket, host: str, token: str, generation: int = 0
    ) -> MeetingServer:
        """At a port that is bound already; ``host`` is how others call this one."""
        address = places.tcp_address(host, listener.getsockname()[1])
        return cls(places.above_stdio(listener), address, token, generation)

    def __enter__(self) -> MeetingServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends the server."""
        self.close()

    # For the process that holds it ------------------------------------------------------------

    def report_failure(self, rank: int, reason: str) -> None:
        """Tells ranks that wait for others of one that will not come; the first report counts."""
        self._do(lambda: self._fail(rank, reason))

    def hold(self, roster: Roster) -> RosterDesk:
        """Serves an elastic run from now on; to be called before its first process starts."""
        self.desk = RosterDesk(roster)
        self.desk.on_change = self._ring
        return self.desk

    def await_joined(self, generation: int, size: int, seconds: float) -> bool:
        """Waits until all ranks have said that they need the server no more."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._joined.get(generation, ())) >= size, seconds
            )

    def end_node(self, node: int) -> None:
        """A node's ranks have ended."""
        with self._changed:
            self._ended.add(node)
            self._changed.notify_all()

    def num_ended(self) -> int:
        """The number of nodes whose ranks have ended."""
        with self._changed:
            return len(self._ended)

    # Requests ---------------------------------------------------------------------------------

    def _welcome(self, guest: Guest) -> None:
        # On one host the random number is the secret itself; between hosts the token is missing.
        self._tell(guest, {"nonce": self._nonce, "generation": self._generation})

    def _serve_request(self, guest: Guest, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "gather":
            self._gather(guest, message)
        elif kind == "missing":
            found = self._rounds.get((message["generation"], message["round"]))
            self._tell(guest, {"missing": [] if found is None else found.missing()})
        elif kind == "joined":
            self._note_joined(message["generation"], message["rank"], message["size"])
        elif kind == "failed":
            self._fail(int(message["rank"]), str(message["reason"]))
        elif kind == "ended":
            self.end_node(int(message["node"]))
        elif self.desk is not None and self.desk.serves(kind):
            self.desk.serve(guest, message, self._tell)
        else:
            raise KeyError(kind)
        if kind in ("failed", "ended"):
            self._tell(guest, {"noted": True})

    def _note_joined(self, generation: int, rank: int, size: int) -> None:
        with self._changed:
            joined = self._joined.setdefault(generation, set())
            joined.add(rank)
            self._changed.notify_all()
        # A server for one world is of no use once all are in it, and a fork would inherit it.
        self._is_closing |= generation == self._generation and len(joined) >= size

    def _gather(self, guest: Guest, message: dict[str, Any]) -> None:
        key = (int(message["generation"]), int(message["round"]))
        rank, size, process = int(message["rank"]), int(message["size"]), str(message["process"])
        found = self._complete.get(key) or self._rounds.setdefault(key, GatherRound(rank, size))
        found.refusal = found.refusal or found.conflict(rank, size, process)
        if found.refusal:
            for each in (guest, *found.waiting.values()):
                self._tell(each, {"error": found.refusal})
            found.waiting.clear()
            if key in self._complete:  # that world is whole: only the one that came late is wrong
                found.refusal = ""
            return
        found.brought[rank], found.waiting[rank] = str(message["data"]), guest
        found.came[rank] = process
        if not found.missing():
            self._close_round(key, found)
        elif (failure := self._failure_of(key[0])) is not None:
            self._tell_failure(found, failure)

    def _close_round(self, key: tuple[int, int], found: GatherRound) -> None:
        gathered = [found.brought[each] for each in range(found.size)]
        for each in found.waiting.values():
            self._tell(each, {"gathered": gathered})
        del self._rounds[key]
        found.waiting.clear()
        found.brought.clear()
        # Who came is kept, for one that comes too much; of the last world, they may be many.
        self._complete = {one: old for one, old in self._complete.items() if one[0] >= key[0]}
        self._complete[key] = found

    def _fail(self, rank: int, reason: str) -> None:
        if self._failure is None:
            self._failure = {"rank": rank, "reason": reason}
        for found in self._rounds.values():
            self._tell_failure(found, self._failure)

    def _failure_of(self, generation: int) -> dict[str, Any] | None:
        """Why the world of a generation cannot be formed, if it cannot."""
        if self._broken is not None and self._broken[0] == generation:
            return self._broken[1]
        return self._failure

    def _tell_failure(self, found: GatherRound, failure: dict[str, Any]) -> None:
        """To those who wait. The rank may have been here before it ended: somebody is missing."""
        for guest in found.waiting.values():
            self._tell(guest, {"failure": failure})
        found.waiting.clear()

    # An elastic run ---------------------------------------------------------------------------

    def _due(self) -> list[float]:
        due = None if self.desk is None else self.desk.due()
        return [] if due is None else [due]

    def _tick(self, now: float) -> None:
        """Passes on what the roster has to say, also to those that form a world in vain."""
        if self.desk is None:
            return
        self.desk.tick(now, self._tell)
        broken = self.desk.broken()
        if broken is None or broken == self._broken:
            return
        self._broken = broken
        self._rounds = {key: old for key, old in self._rounds.items() if key[0] >= broken[0]}
        self._joined = {key: old for key, old in self._joined.items() if key >= broken[0]}
        for key, found in self._rounds.items():
            if key[0] == broken[0]:
                self._tell_failure(found, broken[1])

    def _tell(self, guest: Guest, message: Any) -> None:
        if guest in self._guests and guest.wire is not None:
            self._say(guest, message)
            with contextlib.suppress(OSError):  # what is wrong shows when it is read from
                self._send_rest(guest)

    def _forget(self, guest: Guest) -> None:
        for found in self._rounds.values():
            found.leave(guest)
        if self.desk is not None:
            self.desk.forget(guest)
        super()._forget(guest)

"""From a bootstrap to the sockets between ranks.

Each rank listens, tells the others where, calls its lower neighbours and answers its higher ones
(see [Note: the graph of a group]). All of that goes on at once in one loop, so a stranger that
connects and says nothing delays no rank: it is dropped when its time is up. Where all pairs are
connected, the listener is closed; else it stays for ranks that will have something to say.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from shoal.comm.control.addresses import ADDRESS_VARIABLE, own_address, settled_address
from shoal.comm.control.sockets import topology
from shoal.comm.control.sockets.switchboard import Address, Line, Switchboard
from shoal.errors import ShoalError
from shoal.meeting.handshake import TOKEN_VARIABLE, HandshakeError, fingerprint, make_key

if TYPE_CHECKING:
    from shoal.comm.bootstrap.bootstrap import Bootstrap

# The ranks have met at the bootstrap already, so what remains is a matter of moments.
CONNECT_S = 30.0
# Room for strangers who wait for an answer: a rank that finds none calls again after a second.
_BACKLOG = 1024


class Wires(NamedTuple):
    """The sockets of one rank.

    Attributes:
        sockets: To its neighbours, by rank.
        line: For connections to come; none where all pairs are connected.
    """

    sockets: dict[int, socket.socket]
    line: Line | None


def connect_all(bootstrap: Bootstrap) -> Wires:
    """A socket to each neighbour. Every rank of the world calls this."""
    if bootstrap.size == 1:
        return Wires({}, None)
    host, key = _exchange_key(bootstrap)
    listener = _listen(host, bootstrap.size)
    try:
        addresses = _exchange_addresses(bootstrap, listener, key)
        line = Line(bootstrap.rank, key, listener, addresses)
        wiring = _Wiring(line, min(CONNECT_S, bootstrap.timeout))
        try:
            _check_everybody(bootstrap, wiring.build())
        except BaseException:
            wiring.close()
            raise
    except BaseException:
        listener.close()
        raise
    if topology.is_sparse(bootstrap.size):
        return Wires(wiring.sockets, line)
    listener.close()
    return Wires(wiring.sockets, None)


def _exchange_key(bootstrap: Bootstrap) -> tuple[str, bytes]:
    """This host's address, and the key made of rank 0's token and the world's secret, if any."""
    mine = {"host": own_address(bootstrap), "token": ""}
    if bootstrap.rank == 0:
        mine["token"] = secrets.token_hex(32)
    everybody = [json.loads(data) for data in bootstrap.all_gather(json.dumps(mine).encode())]
    host = settled_address(mine["host"], [each["host"] for each in everybody])
    secret = bootstrap.secret.hex() if bootstrap.secret else os.environ.get(TOKEN_VARIABLE, "")
    return host, make_key(everybody[0]["token"], secret)


def _listen(host: str, size: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=size + _BACKLOG)
    except OSError as error:
        raise ShoalError(
            f"cannot listen on {host}: {error}. Set {ADDRESS_VARIABLE} to the address of this "
            "host by which the others reach it."
        ) from error
    listener.setblocking(False)
    return listener


def _exchange_addresses(bootstrap: Bootstrap, listener: socket.socket, key: bytes) -> list[Address]:
    host, port = listener.getsockname()[:2]
    mine = Address(host, port, fingerprint(key))
    encoded = bootstrap.all_gather(json.dumps(mine).encode())
    addresses = [Address(*json.loads(data)) for data in encoded]
    others = [
        rank for rank, address in enumerate(addresses) if address.fingerprint != mine.fingerprint
    ]
    if others:
        raise ShoalError(
            f"rank {bootstrap.rank} and ranks {others} have different keys: "
            f"{TOKEN_VARIABLE} must have the same value, or none, on every rank"
        )
    return addresses


def _check_everybody(bootstrap: Bootstrap, error: str) -> None:
    """Raises on every rank if any rank misses a socket, so that no rank starts without."""
    errors = [data.decode() for data in bootstrap.all_gather(error.encode())]
    for rank, text in enumerate(errors):
        if text:
            raise ShoalError(
                f"the ranks could not connect to each other. Rank {rank}: {text}.\nCheck that no "
                f"firewall is between the hosts; {ADDRESS_VARIABLE} on each host sets the address "
                "by which the others reach it."
            )


class _Wiring:
    """The loop in which a rank calls and answers."""

    def __init__(self, line: Line, seconds: float) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._rank = line.rank
        self._neighbours = topology.neighbours(line.rank, range(line.size))
        self._deadline = time.monotonic() + seconds
        self._selector = selectors.DefaultSelector()
        self._switchboard = Switchboard(line, self._selector, self._connected, self._failed)

    def build(self) -> str:
        """Connects to all neighbours; returns what went wrong, if anything did."""
        try:
            for peer in self._neighbours:
                if peer < self._rank:
                    self._switchboard.call(peer, self._deadline)
            while len(self.sockets) < len(self._neighbours):
                self._turn()
        except (OSError, HandshakeError) as error:
            return str(error)
        finally:
            self._switchboard.close()
            self._selector.close()
        return ""

    def close(self) -> None:
        """Lets go of what was connected."""
        for sock in self.sockets.values():
            sock.close()

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            missing = sorted(set(self._neighbours) - set(self.sockets))
            raise HandshakeError(f"no connection with ranks {missing} in time")
        under_way = self._switchboard.under_way
        nearest = min((each.deadline for each in under_way), default=self._deadline)
        timeout = max(0.0, min(nearest, self._deadline) - now)
        for event, _ in self._selector.select(timeout):
            self._switchboard.serve(event.data)
        self._switchboard.drop_overdue(time.monotonic())

    def _connected(self, peer: int, sock: socket.socket) -> None:
        if peer in self.sockets or peer not in self._neighbours:
            sock.close()
        else:
            self.sockets[peer] = sock

    def _failed(self, peer: int, error: str) -> None:
        raise HandshakeError(error)

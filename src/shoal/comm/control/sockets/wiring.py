"""From a bootstrap to a socket between each two ranks.

Each rank listens, tells the others where, calls every lower rank and answers every higher one.
All of that goes on at once in one loop, so a stranger that connects and says nothing delays no
rank: it is dropped when its time is up. The listener is closed once all ranks are connected.

[Note: the handshake]
Two ranks prove to each other who they are before they talk. Both know a key and never show it. The
caller says its rank and a random number; the called answers with a random number of its own and a
proof that it knows the key; the caller returns its proof. A proof covers both random numbers, both
ranks and the side that makes it, so nothing that was overheard, or said by the other side, can be
used again. The two sides are generators that know nothing of sockets: each yields what to send and
how many bytes it then needs, is sent those bytes, and returns the peer's rank. `Handshake` runs one
of them over a socket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal.comm.control.addresses import ADDRESS_VARIABLE, own_address, settled_address
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.comm.bootstrap.store import Bootstrap

logger = logging.getLogger("shoal")

# The ranks have met at the bootstrap already, so what remains is a matter of moments.
CONNECT_S = 30.0
ANSWER_S = 5.0
TOKEN_VARIABLE = "SHOAL_TOKEN"
HandshakeSteps = Generator[tuple[bytes, int], bytes, int]

_MAGIC = b"shoal\0\0\1"
_HELLO = struct.Struct("<8sII32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class Address(NamedTuple):
    """Where a rank listens, and whether it has the key that all should have."""

    host: str
    port: int
    fingerprint: str


def connect_all(bootstrap: Bootstrap) -> dict[int, socket.socket]:
    """A socket to each other rank, by rank. Every rank of the world calls this."""
    if bootstrap.size == 1:
        return {}
    host, key = _exchange_key(bootstrap)
    with _listen(host, bootstrap.size) as listener:
        addresses = _exchange_addresses(bootstrap, listener, key)
        wiring = _Wiring(bootstrap, key, listener)
        error = wiring.build(addresses)
    try:
        _check_everybody(bootstrap, error)
    except BaseException:
        wiring.close()
        raise
    return wiring.sockets


def _exchange_key(bootstrap: Bootstrap) -> tuple[str, bytes]:
    """This host's address, and the key made of rank 0's token and the user's, if any."""
    mine = {"host": own_address(bootstrap), "token": ""}
    if bootstrap.rank == 0:
        mine["token"] = secrets.token_hex(32)
    everybody = [json.loads(data) for data in bootstrap.all_gather(json.dumps(mine).encode())]
    host = settled_address(mine["host"], [each["host"] for each in everybody])
    return host, make_key(everybody[0]["token"], os.environ.get(TOKEN_VARIABLE, ""))


def _listen(host: str, size: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=size + 16)
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

    def __init__(self, bootstrap: Bootstrap, key: bytes, listener: socket.socket) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._rank, self._size, self._key = bootstrap.rank, bootstrap.size, key
        self._deadline = time.monotonic() + min(CONNECT_S, bootstrap.timeout)
        self._listener = listener
        self._under_way: set[Handshake] = set()
        self._selector = selectors.DefaultSelector()

    def build(self, addresses: Sequence[Address]) -> str:
        """Connects to everybody; returns what went wrong, if anything did."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            for peer in range(self._rank):
                self._call(peer, addresses[peer])
            while len(self.sockets) < self._size - 1:
                self._turn()
        except (OSError, HandshakeError) as error:
            return str(error)
        except BaseException:
            self.close()
            raise
        finally:
            for attempt in self._under_way:
                attempt.socket.close()
            self._selector.close()
        return ""

    def close(self) -> None:
        """Lets go of what was connected."""
        for sock in self.sockets.values():
            sock.close()

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            missing = set(range(self._size)) - {self._rank, *self.sockets}
            raise HandshakeError(f"no connection with ranks {sorted(missing)} in time")
        nearest = min((each.deadline for each in self._under_way), default=self._deadline)
        timeout = max(0.0, min(nearest, self._deadline) - now)
        for event, _ in self._selector.select(timeout):
            if event.fileobj is self._listener:
                self._answer()
            else:
                self._go_on(event.data)
        self._drop_overdue()

    def _call(self, peer: int, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        steps = call(self._key, self._rank, peer)
        name = f"rank {peer} at {address.host} port {address.port}"
        attempt = Handshake(sock, steps, name, self._deadline, is_call=True)
        self._under_way.add(attempt)
        code = sock.connect_ex((address.host, address.port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, f"{name}: {os.strerror(code)}")
        self._selector.register(sock, selectors.EVENT_WRITE, attempt)

    def _answer(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:  # it has gone again, or descriptors are short: others may fare better
            return
        sock.setblocking(False)
        steps = answer(self._key, self._rank, self._size)
        name = f"{address[0]} port {address[1]}"
        attempt = Handshake(sock, steps, name, time.monotonic() + ANSWER_S, is_call=False)
        self._under_way.add(attempt)
        self._selector.register(sock, selectors.EVENT_READ, attempt)
        self._go_on(attempt)

    def _go_on(self, attempt: Handshake) -> None:
        try:
            peer = attempt.go_on()
            if peer in self.sockets:
                raise HandshakeError(f"rank {peer} is connected already")
        except (OSError, HandshakeError) as error:
            self._drop(attempt, error)
            return
        if peer is not None:
            self._forget(attempt)
            self.sockets[peer] = attempt.socket
        elif attempt.is_call:
            self._selector.modify(attempt.socket, selectors.EVENT_READ, attempt)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for attempt in [each for each in self._under_way if each.deadline <= now]:
            self._drop(attempt, HandshakeError("it took too long"))

    def _drop(self, attempt: Handshake, error: Exception) -> None:
        """Our call that fails is an error; a caller that fails to prove itself is a stranger."""
        self._forget(attempt)
        attempt.socket.close()
        if attempt.is_call:
            raise HandshakeError(f"{attempt.name}: {error}") from error
        logger.warning("dropped a connection from %s: %s", attempt.name, error)

    def _forget(self, attempt: Handshake) -> None:
        self._selector.unregister(attempt.socket)
        self._under_way.discard(attempt)


# See [Note: the handshake] ----------------------------------------------------------------------


class HandshakeError(Exception):
    """The other side is not who it should be."""


def make_key(token: str, secret: str) -> bytes:
    """The key of a world: ``token`` is the run's own, ``secret`` what the user added."""
    return hashlib.sha256(f"{len(token)}:{token}{secret}".encode()).digest()


def fingerprint(key: bytes) -> str:
    """Lets ranks see that their keys are the same."""
    return _prove(key, b"fingerprint", b"").hex()


def call(key: bytes, rank: int, peer: int) -> HandshakeSteps:
    """The side of ``rank``, which has connected to ``peer``."""
    hello = _HELLO.pack(_MAGIC, rank, peer, secrets.token_bytes(_NONCE_BYTES))
    reply = yield hello, _NONCE_BYTES + _PROOF_BYTES
    nonce, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    _check(proof, _prove(key, b"called", hello + nonce))
    yield _prove(key, b"caller", hello + nonce), 0
    return peer


def answer(key: bytes, rank: int, size: int) -> HandshakeSteps:
    """The side of ``rank``, to which another has connected."""
    hello = yield b"", _HELLO.size
    magic, caller, called, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or called != rank or not rank < caller < size:
        raise HandshakeError("it speaks another language or means another rank")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    reply = nonce + _prove(key, b"called", hello + nonce)
    proof = yield reply, _PROOF_BYTES
    _check(proof, _prove(key, b"caller", hello + nonce))
    return int(caller)


def _prove(key: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + transcript, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("it does not know this run's key")


class Handshake:
    """One handshake under way, over one socket that never blocks."""

    def __init__(
        self,
        sock: socket.socket,
        steps: HandshakeSteps,
        name: str,
        deadline: float,
        *,
        is_call: bool,
    ) -> None:
        """``name`` says who is at the other end; ``is_call`` whether it was us who connected."""
        self.socket, self.name, self.deadline, self.is_call = sock, name, deadline, is_call
        self._steps = steps
        self._is_begun = False
        self._wanted = 0
        self._received = b""

    def go_on(self) -> int | None:
        """Does what can be done now; returns the peer's rank once it is proven."""
        try:
            if not self._is_begun:
                self._begin()
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._receive()
        except StopIteration as end:
            return int(end.value)
        return None

    def _begin(self) -> None:
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._is_begun = True
        self._send(next(self._steps))

    def _receive(self) -> None:
        """Never more than was asked for: what follows is for the connection to read."""
        missing = self._wanted - len(self._received)
        data = self.socket.recv(missing) if missing else b""
        if missing and not data:
            raise HandshakeError("it hung up")
        self._received += data
        if len(self._received) == self._wanted:
            received, self._received = self._received, b""
            self._send(self._steps.send(received))

    def _send(self, step: tuple[bytes, int]) -> None:
        data, self._wanted = step
        # A hundred bytes always fit into the buffer of a new socket.
        if self.socket.send(data) != len(data):
            raise HandshakeError("it does not listen")

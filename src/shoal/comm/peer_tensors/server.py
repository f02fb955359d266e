"""The thread of a rank that serves what it lends; see [Note: lent tensors].

One thread serves all who ask, and never waits for one of them. Who calls proves first that it
belongs to this world (see [Note: the handshake]); on one host the kernel also says whose process it
is. Requests and answers are JSON, values are the tensor's bytes: nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from typing import Any

import torch
from torch import Tensor

from shoal.comm.peer_tensors.lending import CalledSource, LendingSource, Lent
from shoal.comm.peer_tensors.values import READY, check_digest, description, room_for
from shoal.errors import ShoalError
from shoal.meeting import address as places
from shoal.meeting.handshake import make_key
from shoal.meeting.server_thread import Guest, ServerThread
from shoal.meeting.wire import Wire
from shoal.torch_internals.tensors import version_of
from shoal.torch_support.memory import as_memory

_MOST_RANKS = 1 << 31


class TensorServer(ServerThread):
    """Serves the tensors that this rank lends, by the number of the lending."""

    answer_s = 10.0
    most_unproven = 64

    def __init__(self, rank: int, secret: bytes | None, host: str | None) -> None:
        """``host`` is this host's address towards others; None if all ranks are on this one."""
        self.token = secrets.token_hex(32)
        """Those who know it may ask, if they know the world's secret as well."""
        self.sources: dict[int, LendingSource] = {}
        super().__init__(*_listen(host), f"to the tensors that rank {rank} lends")
        # Calls whose values are on their way: the call, the values, and what is missing of them.
        self._coming: dict[Guest, tuple[dict[str, Any], Tensor, memoryview]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._start(f"shoal-tensors-{rank}", server_key(self.token, secret), rank, _MOST_RANKS)
        _servers.add(self)

    def close(self) -> None:
        """Lends nothing more, and hangs up on all. Twice is fine."""
        if not self._is_closing:
            self._is_closing = True
            self.sources.clear()
            super().close()

    def abandon(self) -> None:
        """In a forked child, which has the sockets and not the thread: the rank's are its own."""
        self._is_closing = True
        self.sources.clear()
        self._let_go(is_owner=False)

    def _hear(self, guest: Guest, wire: Wire) -> None:
        if guest in self._coming:
            self._take_values(guest)
        else:
            super()._hear(guest, wire)
        if guest in self._guests:
            self._send_rest(guest)

    def _take_values(self, guest: Guest) -> None:
        message, values, missing = self._coming[guest]
        with contextlib.suppress(BlockingIOError):
            count = guest.socket.recv_into(missing)
            if not count:
                self._forget(guest)
                return
            missing = missing[count:]
            self._coming[guest] = (message, values, missing)
        if not missing:
            del self._coming[guest]
            check_digest(message, as_memory(values), is_one_host=self._is_one_host)
            self._call(guest, message, values.view(message["shape"]))

    def _forget(self, guest: Guest) -> None:
        self._coming.pop(guest, None)
        super()._forget(guest)

    # Answers ----------------------------------------------------------------------------------

    def _serve_request(self, guest: Guest, message: dict[str, Any]) -> None:
        source = self.sources.get(int(message["lending"]))
        if source is None:
            self._say(guest, {"closed": True})
        elif message["kind"] == "list":
            self._say(guest, {"listing": source.listing()})
        elif message["kind"] == "call" and message.get("bytes"):
            values = room_for(message)
            self._coming[guest] = (message, values, as_memory(values))
            self._say(guest, READY)
        elif message["kind"] == "call":
            empty = room_for(message).view(message["shape"]) if "bytes" in message else None
            self._call(guest, message, empty)
        else:
            self._lend(guest, source, str(message["key"]))

    def _lend(self, guest: Guest, source: LendingSource, key: str) -> None:
        try:
            lent = source.find(key)
            memory = None if lent is None else self._host_memory(lent)
        except (ShoalError, RuntimeError) as error:  # torch's, of memory that ran out
            self._say(guest, {"error": f"{type(error).__name__}: {error}"})
            return
        if lent is None or memory is None:
            self._say(guest, {"listing": source.listing()})
            return
        self._send(guest, lent, memory, {})

    def _call(self, guest: Guest, message: dict[str, Any], values: Tensor | None) -> None:
        source = self.sources.get(int(message["lending"]))
        if not isinstance(source, CalledSource):
            self._say(guest, {"closed": True})
            return
        try:
            answer = source.handle(dict(message["request"]), values)
        except Exception as error:  # whatever it is, the one who called is told
            self._say(guest, {"error": f"{type(error).__name__}: {error}"})
            return
        if answer.values is None:
            self._say(guest, {"answer": answer.data})
        else:
            lent = Lent(answer.values)
            self._send(guest, lent, as_memory(lent.tensor), {"answer": answer.data})

    def _send(self, guest: Guest, lent: Lent, memory: memoryview, said: dict[str, Any]) -> None:
        told = description(lent.tensor, memory, is_one_host=self._is_one_host)
        self._say(guest, {**said, **told})
        before = known_version(lent)

        def sent() -> None:
            self._say(guest, {"unchanged": known_version(lent) == before})

        guest.unsent.append((memory, sent))

    def _host_memory(self, lent: Lent) -> memoryview:
        """The bytes; those of a GPU are copied beside what the rank computes."""
        if lent.ready is None:
            return as_memory(lent.tensor)
        device = lent.tensor.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            stream.wait_event(lent.ready)
            return as_memory(lent.tensor)


def server_key(token: str, secret: bytes | None) -> bytes:
    """What both sides know: the server's token, and the world's secret where there is one."""
    return make_key(token, secret.hex() if secret else "")


def known_version(lent: Lent) -> int:
    """Grows when the tensor is written to; tensors of inference mode do not count that."""
    return 0 if lent.tensor.is_inference() else version_of(lent.tensor)


def _listen(host: str | None) -> tuple[socket.socket, str]:
    if host is None:
        address = places.unix_address("tensors", secrets.token_hex(16))
        return places.listen_unix(address), address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = places.above_stdio(socket.create_server((host, 0), family=family, backlog=1024))
    return listener, places.tcp_address(host, listener.getsockname()[1])


_servers: weakref.WeakSet[TensorServer] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for server in list(_servers):
        server.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)

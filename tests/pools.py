"""Worlds that stay up between tests, so that no test pays for starting processes.

A pool is one `shoal.run` in a background thread. Its ranks take calls from the test, make them
on the world they already have, and answer. A call that fails ends the pool, as it would end any
run; the next test that asks gets a new one. Ranks of "memory" are threads and cost nothing to
start, so for them every call is a run of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

import leaks
import shoal
from shoal.launch.function.call import decode_call, encode_call
from shoal.launch.function.forkserver.forkserver import fork_server

# A rank that hangs must become an error, with the place named, before its test is timed out.
TIMEOUT_S = 40.0
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("=3i")  # process, user, group


class Pool:
    """Processes of one world that wait for calls.

    Example:
        >>> pool = Pool("shm", 2)
        >>> pool.run(lambda x: x + shoal.world().rank, 40)
        [40, 41]
        >>> pool.close()
    """

    def __init__(self, backend: str, size: int) -> None:
        """Returns when every rank has joined."""
        self.backend, self.size = backend, size
        self._error: BaseException | None = None
        self._address = f"\0shoal-pool-{os.getpid()}-{secrets.token_hex(4)}"
        self._thread = threading.Thread(target=self._host, name=f"pool-{backend}-{size}")
        self._thread.daemon = True
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(size)
            listener.settimeout(0.5)
            self._thread.start()
            self._channels = self._admit(listener)

    def _host(self) -> None:
        try:
            shoal.run(_serve, self.size, self.backend, args=(self._address,), timeout=TIMEOUT_S)
        except BaseException as error:
            self._error = error

    def _admit(self, listener: socket.socket) -> list[socket.socket]:
        channels: dict[int, socket.socket] = {}
        while len(channels) < self.size:
            with contextlib.suppress(TimeoutError):
                channel, _ = listener.accept()
                hello = _receive_bytes(channel) if _is_ours(channel) else None
                if hello is None:  # a rank that died, or a test next door that plays a stranger
                    channel.close()
                else:
                    channels[pickle.loads(hello)] = channel
            if not self.is_alive:
                for channel in channels.values():
                    channel.close()
                raise self._error or RuntimeError("the ranks of a pool ended before they began")
        return [channels[rank] for rank in range(self.size)]

    @property
    def is_alive(self) -> bool:
        """Whether there are ranks to call."""
        return self._thread.is_alive()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``fn(*args)`` on every rank; results by rank, errors as `shoal.run` raises them."""
        call = encode_call(fn, args)
        with _adopting_connections():
            answers = self._exchange(call)
        if all(is_value for is_value, _ in answers):
            return [value for _, value in answers]
        self.close()
        raise self._error or RuntimeError("a rank failed, and the run did not")

    def _exchange(self, call: bytes) -> list[tuple[bool, Any]]:
        try:
            for channel in self._channels:
                _send(channel, call)
            return [_receive(channel) for channel in self._channels]
        except Exception:
            self.close()
            raise self._error or RuntimeError("a rank of the pool ended") from None
        except BaseException:  # the test was interrupted
            self.close()
            raise

    def close(self) -> None:
        """Lets the ranks return, and waits until they have ended. Twice is fine."""
        for channel in self._channels:
            channel.close()
        self._thread.join()


@contextlib.contextmanager
def _adopting_connections() -> Iterator[None]:
    """What ranks connect to in this process (the store, for a group) lives as long as they do."""
    before = frozenset(leaks._descriptors())
    yield
    watch = leaks.Watch.current
    if watch is not None:
        theirs = frozenset(leaks._descriptors()) - before
        descriptors = watch.baseline.descriptors | theirs
        watch.baseline = dataclasses.replace(watch.baseline, descriptors=descriptors)


def _serve(address: str) -> None:
    """What each rank of a pool does: answers calls until the test closes the connection."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(address)
        _send(channel, cloudpickle.dumps(shoal.world().rank))
        while (call := _receive_bytes(channel)) is not None:
            fn, args = decode_call(call)
            try:
                answer = cloudpickle.dumps((True, fn(*args)))
            except BaseException:
                _send(channel, cloudpickle.dumps((False, None)))
                raise
            _send(channel, answer)


def _is_ours(channel: socket.socket) -> bool:
    channel.settimeout(None)
    peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(peer)[1] == os.getuid()


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket) -> Any:
    return pickle.loads(_receive_bytes(channel) or b"")


def _receive_bytes(channel: socket.socket) -> bytes | None:
    prefix = _receive_exactly(channel, _LENGTH.size)
    return None if prefix is None else _receive_exactly(channel, *_LENGTH.unpack(prefix))


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        piece = channel.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


class Team:
    """A world of some backend and size for tests to call, whatever is behind it."""

    def __init__(self, backend: str, size: int) -> None:
        self.backend, self.size = backend, size

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``fn(*args)`` on every rank; results by rank, errors as `shoal.run` raises them."""
        if self.backend == "memory":
            return shoal.run(fn, self.size, "memory", args=args, timeout=TIMEOUT_S)
        return get(self.backend, self.size).run(fn, *args)

    def __repr__(self) -> str:
        return f"{self.backend}-{self.size}"


_pools: dict[tuple[str, int], Pool] = {}


def get(backend: str, size: int) -> Pool:
    """The pool of that kind; started when first asked for, and again after a failure."""
    pool = _pools.get((backend, size))
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()  # its ranks are gone, perhaps with the forkserver; its connections are not
        fork_server()
        pool = _pools[backend, size] = Pool(backend, size)
        leaks.baseline()
    return pool


@atexit.register
def close_all() -> None:
    """Ends every pool. They come back when asked for."""
    while _pools:
        _pools.popitem()[1].close()

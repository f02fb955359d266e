"""Worlds for tests of the control plane: ranks are threads of this process, or forked ones."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.page.control import PageControl
from shoal.comm.control.page.page import Page
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control
from shoal.comm.control.sockets import topology
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.comm.control.sockets.wiring import connect_all

TIMEOUT_S = 30.0
# What takes a moment; this is for a machine that has other things to do.
SOON_S = 15.0


class ThreadBootstrap(Bootstrap):
    """Between threads: a list for each round, and a barrier."""

    def __init__(self, rank: int, size: int, shared: dict[int, bytes], barrier: threading.Barrier):
        self.rank, self.size, self.timeout = rank, size, TIMEOUT_S
        self.num_rounds = 0
        self._shared, self._barrier = shared, barrier

    @staticmethod
    def for_all(size: int) -> list[ThreadBootstrap]:
        shared: dict[int, bytes] = {}
        barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        return [ThreadBootstrap(rank, size, shared, barrier) for rank in range(size)]

    def all_gather(self, data: bytes) -> list[bytes]:
        self.num_rounds += 1
        self._shared[self.rank] = data
        self._barrier.wait()
        everybody = [self._shared[rank] for rank in range(self.size)]
        self._barrier.wait()
        return everybody


class FileBootstrap(Bootstrap):
    """Between processes: a file for each rank and round."""

    def __init__(self, folder: Path, rank: int, size: int):
        self.rank, self.size, self.timeout = rank, size, TIMEOUT_S
        self._folder, self._round = folder, 0

    def all_gather(self, data: bytes) -> list[bytes]:
        self._round += 1
        draft = self._folder / f"draft-{self.rank}"
        draft.write_bytes(data)
        draft.rename(self._folder / f"{self._round}-{self.rank}")
        return [self._read(rank) for rank in range(self.size)]

    def _read(self, rank: int) -> bytes:
        path = self._folder / f"{self._round}-{rank}"
        deadline = time.monotonic() + self.timeout
        while not path.exists():
            assert time.monotonic() < deadline, f"rank {rank} never came"
            time.sleep(0.001)
        return path.read_bytes()


class InnerBootstrap(Bootstrap):
    """Between ranks that have a world already, for another one inside it."""

    def __init__(self, world: Any):
        self.rank, self.size, self.timeout = world.rank, world.size, TIMEOUT_S
        self._world = world
        self.secret = world.broadcast_object(secrets.token_bytes(32))

    def all_gather(self, data: bytes) -> list[bytes]:
        return list(self._world.all_gather_object(data))


def on_all(task: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """Calls the task for all at once, in a thread each; raises the first error."""
    size = min(map(len, arguments))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(task, *arguments))


@contextlib.contextmanager
def socket_world(size: int) -> Iterator[list[SocketControl]]:
    with _closing(on_all(SocketControl.connect, ThreadBootstrap.for_all(size))) as controls:
        yield controls


@contextlib.contextmanager
def graph_world(size: int) -> Iterator[list[SocketControl]]:
    """A small world that is connected as a large one is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "ALL_PAIRS_RANKS", 1)
        with socket_world(size) as controls:
            yield controls


@contextlib.contextmanager
def page_world(size: int) -> Iterator[list[PageControl]]:
    fd = Page.create(size)
    pids = [os.getpid()] * size
    controls = [PageControl(Page(fd, size), rank, pids) for rank in range(size)]
    os.close(fd)
    with _closing(controls):
        yield controls


@contextlib.contextmanager
def world_with_puppet(size: int = 2) -> Iterator[tuple[list[SocketControl], socket.socket]]:
    """All ranks but the last are real; of the last there is only its socket to rank 0."""

    def connect(bootstrap: Bootstrap) -> Any:
        is_puppet = bootstrap.rank == size - 1
        return connect_all(bootstrap) if is_puppet else SocketControl.connect(bootstrap)

    *controls, wires = on_all(connect, ThreadBootstrap.for_all(size))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_closing(controls))
        for sock in wires.sockets.values():  # closed first: the others need not wait for it
            stack.enter_context(sock)
        if wires.line is not None:
            stack.enter_context(wires.line.listener)
        yield controls, wires.sockets[0]


@contextlib.contextmanager
def _closing(controls: list[Any]) -> Iterator[list[Any]]:
    try:
        yield controls
    finally:
        on_all(type(controls[0]).close, controls)


def patience(control: Control, timeout: float = TIMEOUT_S) -> Patience:
    return Patience(control, lambda: "a test", range(control.size), timeout)

"""Strangers at the control plane's sockets: crowds, and who says again what ranks said."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from control_worlds import SOON_S, TIMEOUT_S, ThreadBootstrap, graph_world, on_all, patience
from meeting.strangers import CROWD, recorder
from shoal.comm.control.addresses import ADDRESS_VARIABLE
from shoal.comm.control.sockets import switchboard
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.comm.control.sockets.switchboard import Switchboard

MANY = 10_000
SIZE = 4
PLACES_ROUND = 2
MOST_MIB = 16


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")


class Usage:
    """Descriptors and memory of this process: at first, and the most of what was seen since."""

    def __init__(self) -> None:
        self._before = self._most = self._now()

    def look(self) -> None:
        self._most = tuple(map(max, self._most, self._now()))

    def check(self, most_descriptors: int) -> None:
        grown = [most - before for most, before in zip(self._most, self._before, strict=True)]
        assert grown[0] <= most_descriptors, grown
        assert grown[1] <= MOST_MIB, grown

    @staticmethod
    def _now() -> tuple[int, ...]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") >> 20


@contextlib.contextmanager
def crowd(*ports: int) -> Iterator[subprocess.Popen[str]]:
    """Strangers who call these ports; some stay to the end."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", CROWD, str(MANY), "20", *map(str, ports)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_end(process: subprocess.Popen[str], usage: Usage) -> None:
    """Until all have called."""
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(process.stdout.readline)
        while not line.done():
            usage.look()
            time.sleep(0.005)
        assert line.result() == f"{MANY}\n"


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert all("dropped a connection from 127.0.0.1" in line for line in lines), lines
    return lines


class LateBootstrap(ThreadBootstrap):
    """Rank 1 knows where rank 0 listens, and does not call before it is let."""

    port: list[int]
    is_listening: threading.Event
    may_call: threading.Event

    def all_gather(self, data: bytes) -> list[bytes]:
        everybody = super().all_gather(data)
        if self.num_rounds == PLACES_ROUND and self.rank == 1:
            self.port.append(json.loads(everybody[0])[1])
            self.is_listening.set()
            assert self.may_call.wait(TIMEOUT_S)
        return everybody


def late(bootstraps: list[ThreadBootstrap]) -> Any:
    bootstraps[1].__class__ = LateBootstrap
    second: Any = bootstraps[1]
    second.port, second.is_listening, second.may_call = [], threading.Event(), threading.Event()
    return second


def exchange_all(controls: list[SocketControl], number: int) -> None:
    def exchange(control: SocketControl) -> list[bytes]:
        channel = control.channel(0, range(control.size))
        return channel.exchange(number, b"%d" % control.rank, patience(control))

    for found in on_all(exchange, controls):
        assert found == [b"%d" % rank for rank in range(len(controls))]


def test_while_a_world_is_made(caplog: pytest.LogCaptureFixture) -> None:
    bootstraps = ThreadBootstrap.for_all(2)
    second, usage = late(bootstraps), Usage()
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        made = pool.submit(on_all, SocketControl.connect, bootstraps)
        assert second.is_listening.wait(TIMEOUT_S)
        with crowd(*second.port) as strangers:
            await_end(strangers, usage)
            second.may_call.set()
            controls = made.result(TIMEOUT_S)
            exchange_all(controls, 1)
    on_all(SocketControl.close, controls)
    usage.check(switchboard.MOST_UNPROVEN + 16)
    assert len(dropped(caplog)) == 1


def test_while_a_world_works(caplog: pytest.LogCaptureFixture) -> None:
    """A large world, whose ranks go on listening: nothing is late and nothing is lost."""
    with graph_world(SIZE) as controls, caplog.at_level(logging.INFO):
        exchange_all(controls, 1)
        ports = [listening_place(control)[1] for control in controls]
        usage, slowest = Usage(), 0.0
        with crowd(*ports) as strangers, ThreadPoolExecutor(1) as pool:
            end = pool.submit(await_end, strangers, usage)
            number = 1
            while not end.done():
                number, begin = number + 1, time.monotonic()
                exchange_all(controls, number)
                slowest = max(slowest, time.monotonic() - begin)
            end.result()
            exchange_all(controls, number + 1)
        assert number > 3
        assert slowest < SOON_S
        assert all(control.failure() is None for control in controls)
    usage.check(SIZE * switchboard.MOST_UNPROVEN + 16)
    assert len(dropped(caplog)) <= SIZE


def listening_place(control: SocketControl) -> tuple[str, int]:
    line: Any = control._reader._switchboard._line  # type: ignore[union-attr]
    return line.addresses[control.rank].host, line.addresses[control.rank].port


def test_what_a_rank_said_is_of_no_use_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshake and frames, overheard: not in this world, and not in the next."""
    call = Switchboard.call
    with contextlib.ExitStack() as stack:
        kept: list[bytearray] = []

        def call_through_recorder(self: Any, peer: int, deadline: float) -> None:
            if not kept and self._line.rank == 1:
                place = self._line.addresses[peer]
                port, overheard = stack.enter_context(recorder((place.host, place.port)))
                kept.append(overheard)
                places = list(self._line.addresses)
                places[peer] = place._replace(port=port)
                self._line = self._line._replace(addresses=places)
            call(self, peer, deadline)

        monkeypatch.setattr(Switchboard, "call", call_through_recorder)
        with graph_world(2) as controls:
            exchange_all(controls, 1)
            said = bytes(kept[0])
            assert len(said) > 100  # a handshake, and frames
            play(controls, said)
    with graph_world(2) as controls:
        play(controls, said)


def play(controls: list[SocketControl], said: bytes) -> None:
    before = [control.num_connections for control in controls]
    with socket.create_connection(listening_place(controls[0]), TIMEOUT_S) as stranger:
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            stranger.sendall(said)
            while data := stranger.recv(4096):
                heard += data
    assert len(heard) <= 64  # the answer of the handshake, and no word more
    assert [control.num_connections for control in controls] == before
    exchange_all(controls, 2)
    assert all(control.failure() is None for control in controls)

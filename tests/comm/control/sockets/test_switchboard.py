"""Connections that are made when there is something to say."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from control_worlds import SOON_S, TIMEOUT_S, on_all, patience, socket_world
from shoal.comm.control.sockets import reader, switchboard, topology
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.errors import DeadlineError, PeerError

SIZE, FAR = 16, 5


def send(control: SocketControl, peer: int, timeout: float = TIMEOUT_S) -> bytes:
    channel = control.channel(0, range(control.size))
    message = channel.offer(peer, (0, 1), b"from %d" % control.rank, patience(control, timeout))
    message.finish(patience(control))
    return message.theirs


def receive(control: SocketControl, peer: int, timeout: float = TIMEOUT_S) -> bytes:
    channel = control.channel(0, range(control.size))
    answer = partial(bytes, b"by %d" % control.rank)
    message = channel.accept(peer, (0, 1), answer, patience(control, timeout))
    message.finish(patience(control))
    return message.theirs


def test_two_ranks_connect_at_their_first_message() -> None:
    assert FAR not in topology.neighbours(0, range(SIZE))
    with socket_world(SIZE) as controls:
        before = [control.num_connections for control in controls]
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, controls[0], FAR)
            assert receive(controls[FAR], 0) == b"from 0"
            assert sent.result() == b"by 5"
        after = [control.num_connections for control in controls]
    grown = [rank for rank in range(SIZE) if after[rank] > before[rank]]
    assert grown == [0, FAR]


def test_everybody_calls_everybody_at_once() -> None:
    """Two ranks that call each other have two sockets, and nothing is lost or comes twice."""

    def talk(control: SocketControl) -> list[bytes]:
        others = [rank for rank in range(SIZE) if rank != control.rank]
        with ThreadPoolExecutor(2 * SIZE) as pool:
            sends = [pool.submit(send, control, rank) for rank in others]
            received = list(pool.map(lambda rank: receive(control, rank), others))
            assert [each.result() for each in sends] == [b"by %d" % rank for rank in others]
        return received

    with socket_world(SIZE) as controls:
        results = on_all(talk, controls)
        assert all(control.num_connections <= 2 * (SIZE - 1) for control in controls)
        assert all(control.failure() is None for control in controls)
        for control in controls:
            control.leave()
        assert all(control.failure() is None for control in controls)
    for rank, received in enumerate(results):
        assert received == [b"from %d" % other for other in range(SIZE) if other != rank]


def test_a_rank_that_waits_for_a_message_hears_where_its_sender_is() -> None:
    with socket_world(SIZE) as controls:
        controls[FAR].note("computing at train.py:17")
        with pytest.raises(DeadlineError, match=r"rank 5 was last in computing at train\.py:17"):
            receive(controls[0], FAR, timeout=2.0)


def test_a_message_to_a_rank_that_left_is_an_error_at_once() -> None:
    with socket_world(SIZE) as controls:
        controls[FAR].leave()
        controls[FAR].close()
        for meet in (send, receive):
            begin = time.monotonic()
            with pytest.raises(PeerError, match="rank 5 failed: it has left"):
                meet(controls[0], FAR)
            assert time.monotonic() - begin < SOON_S


def test_a_rank_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_CALL_S", 0.5)
    with socket_world(SIZE) as controls:
        line = controls[0]._reader._switchboard._line  # type: ignore[union-attr]
        line.addresses[FAR] = line.addresses[FAR]._replace(port=1)  # type: ignore[index]
        with pytest.raises(PeerError, match="rank 5 failed: it could not be reached: rank 5 at"):
            send(controls[0], FAR)


@contextlib.contextmanager
def strangers(control: SocketControl, words: list[bytes]) -> Iterator[list[socket.socket]]:
    address = control._reader._switchboard._line.addresses[control.rank]  # type: ignore[union-attr]
    with contextlib.ExitStack() as stack:
        found = []
        for word in words:
            stranger = socket.create_connection((address.host, address.port), timeout=TIMEOUT_S)
            found.append(stack.enter_context(stranger))
            stranger.send(word)
        yield found


def test_strangers_are_dropped_while_the_world_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "ANSWER_S", 0.1)
    words = [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100)] * 3
    with socket_world(SIZE) as controls, strangers(controls[0], words) as found:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, controls[FAR], 0)
            assert receive(controls[0], FAR) == b"from 5"
            sent.result()
        for stranger in found:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert controls[0].failure() is None


def test_many_silent_strangers_use_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_world(SIZE) as controls:
        monkeypatch.setattr(switchboard, "MOST_UNPROVEN", 4)
        monkeypatch.setattr(switchboard, "ANSWER_S", 1000.0)  # it is not their time that is up
        with strangers(controls[0], [b""] * 10) as found, ThreadPoolExecutor(1) as pool:
            for stranger in found[:6]:
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
            sent = pool.submit(send, controls[FAR], 0)
            assert receive(controls[0], FAR) == b"from 5"
            sent.result()

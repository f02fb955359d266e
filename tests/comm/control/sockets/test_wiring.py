"""How ranks find and trust each other."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from control_worlds import TIMEOUT_S, ThreadBootstrap, on_all
from shoal.comm.control import addresses
from shoal.comm.control.addresses import ADDRESS_VARIABLE
from shoal.comm.control.sockets import switchboard, wiring
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.comm.control.sockets.switchboard import Switchboard
from shoal.errors import ShoalError
from shoal.meeting import handshake
from shoal.meeting.handshake import HandshakeError, HandshakeSteps

KEY, OTHER_KEY = wiring.make_key("token", ""), wiring.make_key("token", "secret")
_PLACES_ROUND = 2


# The handshake, without sockets ---------------------------------------------------------


def shake(caller: HandshakeSteps, called: HandshakeSteps) -> tuple[int, int]:
    """Lets two sides talk; returns whom each of them met."""
    (hello, _), _ = next(caller), next(called)
    reply, _ = called.send(hello)
    proof, _ = caller.send(reply)
    return _returned(caller, b""), _returned(called, proof)


def _returned(talk: HandshakeSteps, data: bytes) -> int:
    with pytest.raises(StopIteration) as end:
        talk.send(data)
    return int(end.value.value)


def test_two_ranks_with_the_key_meet() -> None:
    assert shake(handshake.call(KEY, 3, 1), handshake.answer(KEY, 1, 4)) == (1, 3)


def test_the_called_must_know_the_key() -> None:
    with pytest.raises(HandshakeError, match="does not know"):
        shake(handshake.call(KEY, 3, 1), handshake.answer(OTHER_KEY, 1, 4))


def test_the_caller_must_know_the_key() -> None:
    called = handshake.answer(KEY, 1, 4)
    next(called)
    hello, _ = next(handshake.call(OTHER_KEY, 3, 1))
    reply, _ = called.send(hello)
    with pytest.raises(HandshakeError, match="does not know"):
        called.send(reply[32:])  # the called's own proof, sent back


def test_a_proof_is_good_for_one_handshake_only() -> None:
    caller = handshake.call(KEY, 3, 1)
    called, again = handshake.answer(KEY, 1, 4), handshake.answer(KEY, 1, 4)
    hello, _ = next(caller)
    next(called)
    next(again)
    proof, _ = caller.send(called.send(hello)[0])
    again.send(hello)
    with pytest.raises(HandshakeError, match="does not know"):
        again.send(proof)


@pytest.mark.parametrize(("rank", "peer"), [(1, 1), (4, 1), (3, 2)])
def test_a_rank_that_has_no_business_calling_is_refused(rank: int, peer: int) -> None:
    with pytest.raises(HandshakeError, match="means another rank"):
        shake(handshake.call(KEY, rank, peer), handshake.answer(KEY, 1, 4))


def test_token_and_secret_do_not_run_into_each_other() -> None:
    assert wiring.make_key("ab", "c") != wiring.make_key("a", "bc")


# Strangers ------------------------------------------------------------------------------


class SpiedBootstrap(ThreadBootstrap):
    """Shows where rank 0 listens, before rank 0 goes on."""

    spy: Callable[[tuple[str, int]], None]

    def all_gather(self, data: bytes) -> list[bytes]:
        everybody = super().all_gather(data)
        if self.num_rounds == _PLACES_ROUND:
            host, port, _ = json.loads(everybody[0])
            self.spy((host, port))
        return everybody


def spied(bootstrap: ThreadBootstrap, spy: Callable[[tuple[str, int]], None]) -> ThreadBootstrap:
    bootstrap.__class__ = SpiedBootstrap
    bootstrap.spy = spy  # type: ignore[attr-defined]
    return bootstrap


def is_dropped(stranger: socket.socket) -> bool:
    stranger.settimeout(TIMEOUT_S)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass
    return True


def say_hello(key: bytes) -> bytes:
    return next(handshake.call(key, 1, 0))[0]


def test_strangers_are_dropped_and_hold_nobody_up() -> None:
    words = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        say_hello(KEY),
        say_hello(KEY) + bytes(32),
    ]
    strangers: list[socket.socket] = []
    places: list[tuple[str, int]] = []

    def intrude(place: tuple[str, int]) -> None:
        places.append(place)
        for word in words:
            strangers.append(socket.create_connection(place))
            strangers[-1].send(word)

    first, second = ThreadBootstrap.for_all(2)
    controls = on_all(SocketControl.connect, [spied(first, intrude), second])
    try:
        assert len(strangers) == len(words)
        assert all(map(is_dropped, strangers))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(places[0])
    finally:
        on_all(SocketControl.close, controls)
        for stranger in strangers:
            stranger.close()


def test_a_stranger_who_says_nothing_is_dropped_while_others_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switchboard, "ANSWER_S", 0.1)
    stranger_is_gone = threading.Event()
    place: list[tuple[str, int]] = []
    listening = threading.Event()

    def tell_stranger(found: tuple[str, int]) -> None:
        place.append(found)
        listening.set()

    def hold_back(_: tuple[str, int]) -> None:
        assert stranger_is_gone.wait(TIMEOUT_S)

    def intrude() -> None:
        assert listening.wait(TIMEOUT_S)
        with socket.create_connection(place[0]) as stranger:
            assert is_dropped(stranger)
        stranger_is_gone.set()

    first, second = ThreadBootstrap.for_all(2)
    bootstraps = [spied(first, tell_stranger), spied(second, hold_back)]
    with ThreadPoolExecutor(1) as pool:
        intrusion = pool.submit(intrude)
        controls = on_all(SocketControl.connect, bootstraps)
        intrusion.result()
    on_all(SocketControl.close, controls)


def test_ranks_with_different_secrets_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = iter([b"one", b"two"])
    make_key = wiring.make_key
    monkeypatch.setattr(wiring, "make_key", lambda token, _: make_key(token, str(next(secrets))))
    for error in failures_of_connecting(2):
        assert "SHOAL_TOKEN must have the same value" in str(error)


def test_a_rank_that_cannot_connect_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wiring, "CONNECT_S", 0.5)

    call = Switchboard.call

    def call_elsewhere(self: Any, peer: int, deadline: float) -> None:
        if self._line.rank == 2:
            places = [place._replace(port=1) for place in self._line.addresses]
            self._line = self._line._replace(addresses=places)
        call(self, peer, deadline)

    monkeypatch.setattr(Switchboard, "call", call_elsewhere)
    for error in failures_of_connecting(3):
        assert "could not connect" in str(error)
        assert ADDRESS_VARIABLE in str(error)


def failures_of_connecting(size: int) -> list[ShoalError]:
    def connect(bootstrap: ThreadBootstrap) -> ShoalError:
        with pytest.raises(ShoalError) as caught:
            SocketControl.connect(bootstrap)
        return caught.value

    return on_all(connect, ThreadBootstrap.for_all(size))


# Addresses ------------------------------------------------------------------------------


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> ThreadBootstrap:
    for variable in (ADDRESS_VARIABLE, "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    return ThreadBootstrap.for_all(1)[0]


def test_the_address_is_the_one_towards_the_server(bootstrap: ThreadBootstrap) -> None:
    bootstrap.host = "127.0.0.1"
    assert addresses.own_address(bootstrap) == "127.0.0.1"


def test_the_address_is_the_one_towards_the_master(
    bootstrap: ThreadBootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert addresses.is_loopback(addresses.own_address(bootstrap))


def test_without_a_hint_there_is_still_an_address(bootstrap: ThreadBootstrap) -> None:
    assert addresses.own_address(bootstrap)


def test_the_variable_overrides(
    bootstrap: ThreadBootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.5")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert addresses.own_address(bootstrap) == "127.0.0.5"
    assert addresses.settled_address("127.0.0.5", ["10.0.0.1"]) == "127.0.0.5"


def test_an_address_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "192.0.2.7")
    for error in failures_of_connecting(2):
        assert "cannot listen on 192.0.2.7" in str(error)
        assert ADDRESS_VARIABLE in str(error)


def test_a_loopback_among_public_addresses_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    ways = {"10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(addresses, "address_towards", ways.get)
    assert addresses.settled_address("127.0.1.1", ["127.0.1.1", "10.0.0.2"]) == "10.0.0.1"
    assert addresses.settled_address("127.0.0.1", ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert addresses.settled_address("10.0.0.9", ["127.0.1.1", "10.0.0.2"]) == "10.0.0.9"


def test_a_loopback_that_works_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.usable_loopback() in ("127.0.0.1", "::1")
    monkeypatch.setattr(addresses, "_LOOPBACKS", ((socket.AF_INET, "192.0.2.7"),))
    assert addresses.usable_loopback() is None

"""Exchanges in groups that are too large for all pairs: what it takes, and whom a wait is for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from control_worlds import (
    SOON_S,
    TIMEOUT_S,
    graph_world,
    on_all,
    patience,
    socket_world,
    world_with_puppet,
)
from shoal.comm.control.plane import Control, Failure
from shoal.comm.control.sockets import frames, relay, topology
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.errors import DeadlineError, PeerError, ShoalError
from shoal.meeting.silence import SILENCE_VARIABLE

SIZE = 16
LATE = 5
OTHERS = [rank for rank in range(SIZE) if rank != LATE]


def exchange(control: Control, number: int, header: bytes, timeout: float = 30.0) -> list[bytes]:
    channel = control.channel(0, range(control.size))
    return channel.exchange(number, header, patience(control, timeout))


def without(controls: list[SocketControl], rank: int) -> list[SocketControl]:
    return [control for control in controls if control.rank != rank]


def errors_of(
    kind: type[ShoalError], controls: list[SocketControl], task: Callable[[SocketControl], Any]
) -> list[Any]:
    def run(control: SocketControl) -> ShoalError:
        with pytest.raises(kind) as caught:
            task(control)
        return caught.value

    return on_all(run, controls)


# Headers --------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [[b"a"], [], [b"", b"abc"], [b"a", b"b", b"a", b"a"]])
def test_headers_come_out_as_they_went_in(headers: list[bytes]) -> None:
    encoded = relay.encode_headers(headers)
    if headers:
        assert relay.decode_headers(encoded, b"own") == headers
    own = bytes(bytearray(b"a"))
    assert all(each is own for each in relay.decode_headers(encoded, own) if each == own)


def test_equal_headers_travel_once() -> None:
    header = bytes(200)
    assert len(relay.encode_headers([header] * 2048)) < 220
    assert len(relay.encode_headers([header, b"other"] * 1024)) < 220 + 4 * 2048 + 20


@pytest.mark.parametrize("content", [b"", b"\1\0\0\0\1\0\0\0\xff", b"\2\0\0\0\2\0\0\0"])
def test_headers_that_are_none_are_an_error(content: bytes) -> None:
    with pytest.raises(ShoalError, match="headers"):
        relay.decode_headers(content, b"")


@pytest.mark.parametrize("size", [9, 16, 21])
def test_every_header_reaches_every_rank(size: int) -> None:
    rounds = [
        [b"equal"] * size,
        [b"from %d" % rank for rank in range(size)],
        [b"different" if rank == 3 else b"equal" for rank in range(size)],
    ]

    def run(control: SocketControl) -> list[list[bytes]]:
        return [
            exchange(control, number, headers[control.rank])
            for number, headers in enumerate(rounds, start=1)
        ]

    with socket_world(size) as controls:
        assert on_all(run, controls) == [rounds] * size


def test_headers_that_fit_in_no_frame_go_in_parts() -> None:
    headers = [bytes([rank]) * 400_000 for rank in range(9)]
    with socket_world(9) as controls:
        results = on_all(lambda control: exchange(control, 1, headers[control.rank]), controls)
    assert results == [headers] * 9


def test_groups_of_a_large_world_connect_when_they_are_used() -> None:
    evens, three = list(range(0, 24, 2)), [1, 6, 12]

    def run(control: SocketControl) -> list[Any]:
        groups = {1: evens, 2: three}
        return [
            control.channel(slot, ranks).exchange(1, b"%d" % control.rank, patience(control))
            if control.rank in ranks
            else None
            for slot, ranks in groups.items()
        ]

    with socket_world(24) as controls:
        before = [control.num_connections for control in controls]
        results = on_all(run, controls)
        after = [control.num_connections for control in controls]
    for rank, (in_evens, in_three) in enumerate(results):
        assert in_evens == ([b"%d" % each for each in evens] if rank in evens else None)
        assert in_three == ([b"%d" % each for each in three] if rank in three else None)
        if rank not in evens and rank not in three:
            assert after[rank] == before[rank]
    assert after[1] >= before[1] + 2  # more if both sides called


# What it takes --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_connections_and_frames_grow_with_the_logarithm(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_ASK_AFTER_S", 60.0)  # a busy machine makes waits long
    num_operations = 3

    def run(control: SocketControl) -> tuple[int, int, int]:
        channel = control.channel(0, range(size))
        for number in range(1, num_operations + 1):
            channel.exchange(number, b"all_reduce(float32[8])", patience(control))
            channel.settle(number)
        sent = control.num_sent
        return control.num_connections, sent[frames.HEADER] + sent[frames.RELAY], sent.total()

    with socket_world(size) as controls:
        counts = on_all(run, controls)
    bits = topology.num_rounds(size)
    for num_connections, num_headers, num_frames in counts:
        if size <= topology.ALL_PAIRS_RANKS:
            assert num_connections == size - 1
            assert num_headers == num_operations * (size - 1)
        else:
            assert num_connections <= 2 * bits
            assert num_headers == num_operations * bits
            assert num_frames == num_headers


# Whom a wait is for ---------------------------------------------------------------------


def test_a_deadline_names_the_rank_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that wait for it themselves, and where it was last."""
    monkeypatch.setenv(SILENCE_VARIABLE, "2")  # a heartbeat every half second
    with socket_world(SIZE) as controls:
        on_all(lambda control: exchange(control, 1, b""), controls)
        controls[LATE].note("reading data at train.py:17")
        waiting = without(controls, LATE)
        errors = errors_of(DeadlineError, waiting, lambda each: exchange(each, 2, b"", 3.0))
    for error in errors:
        assert "missing: rank 5\n" in str(error)
        assert "rank 5 was last in reading data at train.py:17" in str(error)


def test_two_ranks_that_did_not_come_are_both_named() -> None:
    with socket_world(SIZE) as controls:
        waiting = [control for control in controls if control.rank not in (3, 12)]
        errors = errors_of(DeadlineError, waiting, lambda each: exchange(each, 1, b"", 3.0))
    assert all("missing: ranks 3, 12\n" in str(error) for error in errors)


def test_a_rank_that_left_is_not_waited_for() -> None:
    with socket_world(SIZE) as controls:
        on_all(lambda control: exchange(control, 1, b""), controls)
        controls[LATE].leave()
        begin = time.monotonic()
        errors = errors_of(PeerError, without(controls, LATE), lambda each: exchange(each, 2, b""))
        assert time.monotonic() - begin < SOON_S
    assert {(error.rank, "it has left" in error.reason) for error in errors} == {(LATE, True)}


def test_what_a_rank_waits_for_is_news_to_all() -> None:
    """Any of them may be part of the same deadlock."""
    with socket_world(SIZE) as controls:
        others = without(controls, LATE)
        for shown in ({LATE: b"first"}, {LATE: b"second"}, {}):
            controls[LATE].show_wait(shown.get(LATE, b""))
            deadline = time.monotonic() + TIMEOUT_S
            while any(control.shown_waits() != shown for control in others):
                assert time.monotonic() < deadline, shown
                time.sleep(0.001)


def test_how_a_rank_left_is_news_to_all() -> None:
    with socket_world(SIZE) as controls:
        controls[LATE].leave("sys.exit(3) at train.py:7")
        errors = errors_of(PeerError, without(controls, LATE), lambda each: exchange(each, 1, b""))
    assert {error.reason for error in errors} == {"it has left by sys.exit(3) at train.py:7"}


def leave(control: SocketControl) -> None:
    control.leave()
    control.close()


def fail(control: SocketControl) -> None:
    control.publish(Failure(control.rank, "boom", time.monotonic_ns()))


@pytest.mark.parametrize("end", [leave, fail])
def test_a_rank_that_goes_after_an_operation_spoils_it_for_nobody(
    end: Callable[[SocketControl], None],
) -> None:
    """The others may hear of its end before they hear of all headers."""

    def run(control: SocketControl) -> list[bytes]:
        headers = exchange(control, 1, b"%d" % control.rank)
        if control.rank % 5 == 0:
            end(control)
        return headers

    for _ in range(3):
        with socket_world(SIZE) as controls:
            assert on_all(run, controls) == [[b"%d" % rank for rank in range(SIZE)]] * SIZE


def test_what_one_rank_waits_for_is_late_only_for_a_moment() -> None:
    """Waits that are long enough to ask around end like others."""
    gate = threading.Event()

    def run(control: SocketControl) -> list[bytes]:
        if control.rank == LATE:
            gate.wait(30)
        return exchange(control, 1, b"%d" % control.rank)

    def open_when_asked(controls: list[SocketControl]) -> None:
        deadline = time.monotonic() + 20
        while not controls[LATE].census._known and time.monotonic() < deadline:
            time.sleep(0.001)
        gate.set()

    with socket_world(SIZE) as controls:
        opener = threading.Thread(target=open_when_asked, args=(controls,))
        opener.start()
        results = on_all(run, controls)
        opener.join()
        assert controls[0].num_sent[frames.CENSUS] > 0
        assert not controls[LATE].census._known
    assert results == [[b"%d" % rank for rank in range(SIZE)]] * SIZE


# Ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [socket_world, graph_world])
def test_a_death_is_news_to_all(world: Any) -> None:
    with world(SIZE) as controls:
        controls[LATE].note("train.py:17")
        on_all(lambda control: exchange(control, 1, b""), controls)
        controls[LATE].close()
        errors = errors_of(PeerError, without(controls, LATE), lambda each: exchange(each, 2, b""))
    for error in errors:
        assert (error.rank, error.reason) == (LATE, "its connection ended")


def test_a_silence_is_news_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "2")
    with world_with_puppet(SIZE) as (controls, _):
        errors = errors_of(PeerError, controls, lambda control: exchange(control, 1, b""))
    for error in errors:
        assert (error.rank, error.reason) == (SIZE - 1, "silent for 2 s")


def test_a_failure_is_news_to_all_with_its_reason() -> None:
    with socket_world(SIZE) as controls:
        fail(controls[LATE])
        controls[LATE].close()
        errors = errors_of(PeerError, without(controls, LATE), lambda each: exchange(each, 1, b""))
    assert {(error.rank, error.reason) for error in errors} == {(LATE, "boom")}


def test_ranks_whose_neighbours_have_all_left_still_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "1")  # a heartbeat every quarter second
    with socket_world(32) as controls:
        leaving = topology.neighbours(0, range(32))
        for rank in leaving:
            leave(controls[rank])
        stranger = next(rank for rank in range(1, 32) if rank not in leaving)
        fail(controls[stranger])
        deadline = time.monotonic() + 20
        while controls[0].failure() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert controls[0].failure()[:2] == (stranger, "boom")


# Settling -------------------------------------------------------------------------------


def test_a_rank_that_asks_knows_who_is_not_through_yet() -> None:
    with socket_world(SIZE) as controls:
        channels = [control.channel(1, range(SIZE)) for control in controls]
        assert channels[0].unsettled(0) == []
        for channel in channels[1:]:
            channel.settle(2)
        assert sum(control.num_sent.total() for control in controls) == 0
        channels[0].settle(1)
        await_unsettled(channels[7], 2, [0])
        channels[0].settle(2)
        await_unsettled(channels[7], 2, [])
        controls[3].leave()
        channels[0].settle(3)
        for channel in channels[1:3] + channels[4:]:
            channel.settle(3)
        await_unsettled(channels[0], 3, [3])


def await_unsettled(channel: Any, number: int, late: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while channel.unsettled(number) != late and time.monotonic() < deadline:
        time.sleep(0.001)
    assert channel.unsettled(number) == late

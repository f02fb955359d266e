"""The control plane over sockets; what it shares with the page is tested on both."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from control_worlds import (
    SOON_S,
    TIMEOUT_S,
    FileBootstrap,
    graph_world,
    on_all,
    page_world,
    patience,
    socket_world,
    world_with_puppet,
)
from shoal.comm.control.plane import Channel, Control, Failure
from shoal.comm.control.sockets import frames, topology
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.errors import ClosedError, DeadlineError, PeerError, ShoalError
from shoal.meeting.silence import SILENCE_VARIABLE

World = Callable[[int], contextlib.AbstractContextManager[list[Any]]]

every_plane = pytest.mark.parametrize(
    "world", [page_world, socket_world, graph_world], ids=["page", "sockets", "graph"]
)
both_graphs = pytest.mark.usefixtures("number_of_pairs")


@pytest.fixture(params=[topology.ALL_PAIRS_RANKS, 1], ids=["all-pairs", "graph"])
def number_of_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds of sockets as they are, and connected as if they were large."""
    monkeypatch.setattr(topology, "ALL_PAIRS_RANKS", request.param)


def exchange_all(controls: list[Control], number: int, slot: int = 0) -> list[list[bytes]]:
    def exchange(control: Control) -> list[bytes]:
        channel = control.channel(slot, range(control.size))
        return channel.exchange(number, b"from %d" % control.rank, patience(control))

    return on_all(exchange, controls)


def fail(control: Control, reason: str, *, culprit: int | None = None) -> None:
    rank = control.rank if culprit is None else culprit
    control.publish(Failure(rank, reason, time.monotonic_ns(), culprit is not None))


def wait_alone(control: Control, timeout: float = 30.0) -> None:
    """Waits for ranks that will not come."""
    control.channel(0, range(control.size)).exchange(1, b"", patience(control, timeout))


# Exchange -------------------------------------------------------------------------------


@every_plane
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everybody_sees_every_header(world: World, size: int) -> None:
    expected = [b"from %d" % rank for rank in range(size)]
    with world(size) as controls:
        for number in (1, 2, 3):
            assert exchange_all(controls, number) == [expected] * size


@every_plane
def test_ranks_in_different_operations_see_each_others_headers(world: World) -> None:
    calls = {0: [b"barrier", b"all_reduce"], 1: [b"all_reduce", b"barrier"]}

    def run(control: Control) -> list[list[bytes]]:
        channel = control.channel(0, range(2))
        return [
            channel.exchange(number, call, patience(control))
            for number, call in enumerate(calls[control.rank], start=1)
        ]

    with world(2) as controls:
        assert (
            on_all(run, controls)
            == [[[b"barrier", b"all_reduce"], [b"all_reduce", b"barrier"]]] * 2
        )


@every_plane
def test_group_order_is_kept(world: World) -> None:
    def run(control: Control) -> list[bytes]:
        channel = control.channel(3, [2, 0, 1])
        return channel.exchange(1, b"%d" % control.rank, patience(control))

    with world(3) as controls:
        assert on_all(run, controls) == [[b"2", b"0", b"1"]] * 3


@every_plane
def test_disjoint_groups_may_share_a_slot(world: World) -> None:
    def run(control: Control) -> list[list[bytes]]:
        ranks = [0, 2] if control.rank % 2 == 0 else [1, 3]
        channel = control.channel(7, ranks)
        return [
            channel.exchange(number, b"%d/%d" % (control.rank, number), patience(control))
            for number in range(1, 20)
        ]

    with world(4) as controls:
        even, odd, also_even, also_odd = on_all(run, controls)
    assert even == also_even == [[b"0/%d" % n, b"2/%d" % n] for n in range(1, 20)]
    assert odd == also_odd == [[b"1/%d" % n, b"3/%d" % n] for n in range(1, 20)]


@every_plane
def test_a_thousand_exchanges(world: World) -> None:
    def run(control: Control) -> bool:
        channel = control.channel(0, range(2))
        return all(
            channel.exchange(number, b"%d" % number, patience(control)) == [b"%d" % number] * 2
            for number in range(1, 1001)
        )

    with world(2) as controls:
        assert on_all(run, controls) == [True, True]


@both_graphs
@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, 500_000])
def test_headers_of_any_size_arrive_whole(num_bytes: int) -> None:
    header = random.Random(0).randbytes(num_bytes)

    def run(control: Control) -> list[bytes]:
        return control.channel(0, range(2)).exchange(1, header, patience(control))

    with socket_world(2) as controls:
        assert on_all(run, controls) == [[header, header]] * 2


def test_a_header_above_the_limit_is_refused() -> None:
    with socket_world(1) as [control], pytest.raises(ShoalError, match="cannot be described"):
        control.channel(0, [0]).exchange(1, bytes(frames.MAX_BODY_BYTES), patience(control))


# Messages -------------------------------------------------------------------------------


@every_plane
def test_messages_are_matched_by_tag_in_any_order(world: World) -> None:
    tags = list(range(8))
    with world(2) as (sender, receiver):
        outgoing, incoming = (control.channel(0, range(2)) for control in (sender, receiver))

        def send(tag: int) -> tuple[int, bytes]:
            message = outgoing.offer(1, (tag, 1), b"sent %d" % tag, patience(sender))
            message.finish(patience(sender))
            return message.ticket, message.theirs

        def receive_all() -> list[bytes]:
            theirs = []
            for tag in reversed(tags):
                message = incoming.accept(
                    0, (tag, 1), partial(bytes, b"got %d" % tag), patience(receiver)
                )
                theirs.append(message.theirs)
                message.finish(patience(receiver))
            return theirs

        with ThreadPoolExecutor(len(tags) + 1) as pool:
            sent = pool.map(send, tags)
            assert receive_all() == [b"sent %d" % tag for tag in reversed(tags)]
            assert [theirs for _, theirs in sent] == [b"got %d" % tag for tag in tags]


@every_plane
def test_tickets_of_open_messages_differ_and_come_back(world: World) -> None:
    with world(2) as (sender, receiver):
        outgoing, incoming = (control.channel(0, range(2)) for control in (sender, receiver))

        def meet(number: int) -> tuple[Any, Any]:
            key = (0, number)
            with ThreadPoolExecutor(1) as pool:
                offer = pool.submit(outgoing.offer, 1, key, b"", patience(sender))
                accepted = incoming.accept(0, key, bytes, patience(receiver))
                return offer.result(), accepted

        first, second = meet(1), meet(2)
        assert [(mine.ticket, theirs.ticket) for mine, theirs in (first, second)] == [
            (0, 0),
            (1, 1),
        ]
        for offered, accepted in (first, second):
            accepted.finish(patience(receiver))
            offered.finish(patience(sender))
        offered, accepted = meet(3)
        assert offered.ticket == accepted.ticket == 0
        for message in (offered, accepted):
            message.abandon()
        assert meet(4)[0].ticket == 0


# Settling -------------------------------------------------------------------------------


@every_plane
def test_a_rank_knows_who_is_not_through_yet(world: World) -> None:
    with world(3) as controls:
        first, second, third = (control.channel(1, range(3)) for control in controls)
        assert first.unsettled(0) == []
        first.settle(2)
        assert first.unsettled(2) == [1, 2]
        second.settle(1)
        third.settle(2)
        await_settled(first, 2, [1])
        controls[1].channel(2, range(3)).settle(9)  # another group's count is not this one's
        second.settle(2)
        controls[1].leave()  # what it said before it left still counts
        for channel in (first, second, third):
            await_settled(channel, 2, [])


@every_plane
@pytest.mark.parametrize("how", ["", "sys.exit(3) at train.py:7"])
def test_who_waits_for_a_rank_that_left_is_told_how(world: World, how: str) -> None:
    with world(3) as controls:
        controls[1].leave(how)
        deadline = time.monotonic() + TIMEOUT_S
        while controls[2].absence(1) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        text = f"it has left by {how}" if how else "it has left: it returned without taking part"
        assert controls[2].absence(1) == text


def await_settled(channel: Channel, number: int, late: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while channel.unsettled(number) != late and time.monotonic() < deadline:
        time.sleep(0.001)
    assert channel.unsettled(number) == late


# Failures -------------------------------------------------------------------------------


@every_plane
def test_a_failure_ends_every_wait(world: World) -> None:
    def run(control: Control) -> PeerError | None:
        if control.rank == 1:
            return fail(control, "ValueError: boom")
        with pytest.raises(PeerError) as caught:
            wait_alone(control)
        return caught.value

    with world(3) as controls:
        begin = time.monotonic()
        first, _, third = on_all(run, controls)
        assert time.monotonic() - begin < SOON_S
    for error in (first, third):
        assert (error.rank, error.reason) == (1, "ValueError: boom")


@every_plane
def test_a_failure_ends_the_wait_for_a_message(world: World) -> None:
    def run(control: Control) -> None:
        channel = control.channel(0, range(3))
        if control.rank == 2:
            fail(control, "boom")
            return
        meet = channel.offer if control.rank == 0 else channel.accept
        with pytest.raises(PeerError, match="rank 2 failed: boom"):
            meet(2, (0, 1), b"", patience(control))

    with world(3) as controls:
        on_all(run, controls)


@every_plane
def test_an_echo_never_hides_its_cause(world: World) -> None:
    with world(3) as (first, second, third):
        fail(first, "an echo", culprit=1)
        fail(second, "the cause")
        fail(third, "later")
        for control in (first, second, third):
            await_failure(control, lambda failure: failure.reason == "the cause")


@every_plane
def test_only_the_first_word_of_a_rank_counts(world: World) -> None:
    with world(2) as (mine, other):
        fail(mine, "first")
        fail(mine, "second")
        mine.leave()
        assert mine.failure().reason == "first"
        await_failure(other, lambda failure: failure.reason == "first")
        assert other.absence(0) is None


@every_plane
def test_a_rank_that_left_is_not_waited_for(world: World) -> None:
    with world(2) as (mine, other):
        other.leave()
        other.leave()
        with pytest.raises(PeerError, match="rank 1 failed: it has left"):
            wait_alone(mine)
        assert mine.failure() is None


@every_plane
def test_a_late_rank_is_an_error_at_the_deadline_that_says_where_it_was(world: World) -> None:
    with world(2) as (mine, other):
        other.note("all_gather at train.py:17")
        on_all(
            lambda control: control.channel(1, range(2)).exchange(1, b"", patience(control)),
            [mine, other],
        )
        with pytest.raises(DeadlineError) as caught:
            wait_alone(mine, timeout=0.1)
    assert "missing: rank 1" in str(caught.value)
    assert "rank 1 was last in all_gather at train.py:17" in str(caught.value)


@every_plane
def test_closing_twice_is_fine(world: World) -> None:
    with world(2) as controls:
        for control in controls:
            control.close()
            control.close()
            control.leave()
            fail(control, "too late")


def await_failure(control: Control, holds: Callable[[Failure], bool]) -> Failure:
    """Polls, since over sockets news takes a moment."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        failure = control.failure()
        if failure is not None and holds(failure):
            return failure
        time.sleep(0.001)
    raise AssertionError(f"the failure is {control.failure()}")


# Ends and silences, over sockets only ---------------------------------------------------


@both_graphs
def test_a_connection_that_ends_is_a_death() -> None:
    with socket_world(3) as (first, second, third):
        second.close()
        for control in (first, third):
            with pytest.raises(PeerError, match="rank 1 failed: its connection ended"):
                wait_alone(control)


@both_graphs
def test_what_a_rank_said_before_its_end_is_its_reason() -> None:
    with world_with_puppet() as ([control], puppet):
        puppet.send(frames.encode_failure(1, Failure(1, "ValueError: boom", time.time_ns())))
        puppet.close()
        with pytest.raises(PeerError, match="rank 1 failed: ValueError: boom"):
            wait_alone(control)


@both_graphs
def test_a_goodbye_before_the_end_is_no_death() -> None:
    with socket_world(2) as (mine, other):
        other.leave()
        other.close()
        with pytest.raises(PeerError, match="it has left"):
            wait_alone(mine)
        assert mine.failure() is None


@both_graphs
def test_a_header_sent_before_leaving_still_counts() -> None:
    with socket_world(2) as (mine, other):
        channel = other.channel(0, range(2))
        with pytest.raises(DeadlineError):
            channel.exchange(1, b"last words", patience(other, timeout=0.01))
        other.leave()
        other.close()
        headers = mine.channel(0, range(2)).exchange(1, b"", patience(mine))
        assert headers == [b"", b"last words"]


@both_graphs
def test_a_silent_peer_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "0.5")
    begin = time.monotonic()  # of the silence, which is older than the wait
    with world_with_puppet() as ([control], _):
        with pytest.raises(PeerError, match=r"rank 1 failed: silent for 0\.5 s"):
            wait_alone(control)
        assert 0.4 < time.monotonic() - begin < SOON_S


@both_graphs
def test_a_silent_peer_that_wakes_up_hears_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "0.1")
    with world_with_puppet() as ([control], puppet):
        with pytest.raises(PeerError, match="silent") as caught:
            wait_alone(control)
        fail(control, caught.value.reason, culprit=1)
        splitter, heard = frames.Splitter(), dict[int, bytes]()
        puppet.settimeout(TIMEOUT_S)
        while frames.FAILURE not in heard:
            heard.update(splitter.feed(puppet.recv(4096)))
        _, failure = frames.decode_failure(heard[frames.FAILURE], size=2)
        assert failure[:2] == (1, "silent for 0.1 s")
        assert failure.is_echo


@both_graphs
def test_a_peer_that_only_computes_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "2")
    with socket_world(2) as (mine, _):
        with pytest.raises(DeadlineError):
            wait_alone(mine, timeout=3.0)
        assert mine.failure() is None


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_silence_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, text)
    with pytest.raises(ShoalError, match=f"{SILENCE_VARIABLE} must be a number of seconds"):
        SocketControl.connect(FileBootstrap(Path(), 0, 1))


@both_graphs
def test_a_peer_that_does_not_read_stalls_nobody() -> None:
    with world_with_puppet(3) as ((first, second), _):
        flood = frames.encode_addressed(frames.HEADER, (9, 1), bytes(1 << 20 >> 1))
        for _ in range(40):
            first.tell([2], flood)

        def run(control: Control) -> list[bytes]:
            return control.channel(1, [0, 1]).exchange(1, b"", patience(control))

        assert on_all(run, [first, second]) == [[b"", b""]] * 2
        begin = time.monotonic()
        fail(first, "boom")
        await_failure(second, lambda failure: failure.reason == "boom")
        assert time.monotonic() - begin < SOON_S


@both_graphs
@pytest.mark.parametrize(
    ("garbage", "problem"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "unknown kind"),
        (b"\xff\xff\xff\xff\x01", "above the limit"),
        (frames.encode(frames.HEADER, b"short"), "too few for its address"),
        (frames.encode_addressed(frames.OFFER, (0, 0, 1)), "too few for its address"),
        (frames.encode(frames.SETTLED, b"short"), "a count of 5 bytes"),
        (frames.encode(frames.CENSUS, b"short"), "a census of 5 bytes"),
        (frames.encode(frames.REACHED, b"short"), "counts of 5 bytes"),
        (frames.encode(frames.WHERE, b"short"), "a note of 5 bytes"),
        (frames.encode(frames.BYE, b"short"), "a goodbye of 5 bytes"),
        (frames.encode_bye(2), "the goodbye of rank 2"),
        (frames.encode(frames.FAILURE, b"short"), "a failure of 5 bytes"),
        (frames.encode_failure(1, Failure(99, "", 0)), "the failure of rank 99"),
    ],
)
def test_garbage_ends_the_connection_and_names_the_peer(garbage: bytes, problem: str) -> None:
    with world_with_puppet() as ([control], puppet):
        puppet.sendall(garbage)
        with pytest.raises(PeerError, match=problem) as caught:
            wait_alone(control)
        assert caught.value.rank == 1
        puppet.settimeout(TIMEOUT_S)
        with contextlib.suppress(ConnectionResetError):
            while puppet.recv(4096):
                pass


def test_frames_cut_anywhere_are_put_together() -> None:
    with world_with_puppet() as ([control], puppet):
        data = frames.encode_addressed(frames.HEADER, (0, 1), b"a header") * 2
        for index in range(len(data)):
            puppet.send(data[index : index + 1])
        headers = control.channel(0, range(2)).exchange(1, b"mine", patience(control))
        assert headers == [b"mine", b"a header"]


@both_graphs
def test_closing_ends_the_waits_of_this_rank() -> None:
    with socket_world(2) as (mine, _), ThreadPoolExecutor(1) as pool:
        wait = pool.submit(wait_alone, mine)
        mine.close()
        with pytest.raises(ClosedError):
            wait.result(timeout=TIMEOUT_S)


@both_graphs
def test_notes_arrive_with_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "1")
    with socket_world(2) as (mine, other):
        assert mine.whereabouts(1) == "its own code, before any operation"
        other.note("computing")
        deadline = time.monotonic() + TIMEOUT_S
        while mine.whereabouts(1) != "computing" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert mine.whereabouts(1) == "computing"


@both_graphs
def test_nothing_is_left() -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = held()
    with socket_world(3) as controls:
        exchange_all(controls, 1)
        assert held() > before
    assert held() == before


# Processes ------------------------------------------------------------------------------

forking = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@contextlib.contextmanager
def forked(task: Callable[[], None]) -> Iterator[int]:
    """A process that does the task; afterwards it is killed, whatever it does."""
    pid = os.fork()
    if pid == 0:
        try:
            task()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def publish_and_exit(control: Control) -> None:
    fail(control, "ValueError: boom")
    os._exit(0)


@both_graphs
@forking
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (publish_and_exit, "ValueError: boom"),
        (lambda _: os._exit(0), "its connection ended"),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), "its connection ended"),
        (lambda _: os.kill(os.getpid(), signal.SIGSTOP), "silent for 1 s"),
    ],
    ids=["publishes", "exits", "killed", "stopped"],
)
def test_the_end_of_a_process(
    end: Callable[[Control], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "1")

    def connect_and_end() -> None:
        control = SocketControl.connect(FileBootstrap(tmp_path, 1, 2))
        control.note("train.py:17")
        control.channel(0, range(2)).exchange(1, b"", patience(control))
        end(control)

    with forked(connect_and_end):
        control = SocketControl.connect(FileBootstrap(tmp_path, 0, 2))
        with contextlib.closing(control):
            channel = control.channel(0, range(2))
            channel.exchange(1, b"", patience(control))
            with pytest.raises(PeerError, match=f"rank 1 failed: {reason}") as caught:
                channel.exchange(2, b"", patience(control))
            assert "rank 1 was last in train.py:17" in str(caught.value)


@both_graphs
@forking
def test_a_forked_child_holds_no_socket_of_its_parent() -> None:
    """A data loader's workers outlive a killed rank; its peers must not wait for them."""
    with socket_world(2) as controls:
        reading, writing = os.pipe()

        def count_sockets() -> None:
            os.write(writing, b"%d" % num_sockets())
            for control in controls:
                control.close()

        num_before = num_sockets()
        with forked(count_sockets):
            num_in_child = int(os.read(reading, 16))
        os.close(reading)
        os.close(writing)
        assert num_in_child <= num_before - 2 * (1 + 2)
        assert exchange_all(controls, 1) == [[b"from 0", b"from 1"]] * 2


def num_sockets() -> int:
    num = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            num += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return num


def test_the_socket_is_tuned() -> None:
    with world_with_puppet() as ([control], _):
        sock = socket.socket(fileno=os.dup(control._connections[1].fileno()))
        with sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

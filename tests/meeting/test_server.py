"""The server where ranks meet: what it gathers, and what strangers get of it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meeting.strangers import as_root, end, recorder, run_stranger, start_stranger
from shoal.comm.bootstrap import bootstrap as bootstrapping
from shoal.comm.bootstrap.bootstrap import MeetingBootstrap, find_server
from shoal.errors import DeadlineError, LaunchError, PeerError
from shoal.meeting import address as places
from shoal.meeting.client import MeetingClient, MeetingGone, NotThereYet, report_failure
from shoal.meeting.handshake import TOKEN_VARIABLE
from shoal.meeting.server import MeetingServer

CROWD = 10_000
_clients: list[MeetingClient] = []
_worlds = itertools.count(1)


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    with one_server(request.param, "the token") as server:
        yield server


def one_server(kind: str, token: str, generation: int = 0) -> MeetingServer:
    if kind == "unix":
        return MeetingServer.on_one_host(None, generation)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    return MeetingServer.between_hosts(listener, "127.0.0.1", token, generation)


def join(server: MeetingServer, rank: int, size: int, timeout: float = 20.0, **more: Any) -> Any:
    client = MeetingClient(server.address)
    _clients.append(client)
    return MeetingBootstrap(client, (rank, size), timeout, **more)


def on_all(size: int, task: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(task, range(size)))


def meet(server: MeetingServer, size: int = 3) -> None:
    """Ranks exchange what they have to say, and agree on a secret."""
    generation = next(_worlds)

    def rank(number: int) -> tuple[list[bytes], list[bytes], bytes]:
        bootstrap = join(server, number, size, generation=generation)
        first = bootstrap.all_gather(b"\0\xff%d" % number)
        second = bootstrap.all_gather(b"x" * 100_000 * number)
        bootstrap.joined()
        return first, second, bootstrap.secret

    found = on_all(size, rank)
    assert found == [found[0]] * size
    assert found[0][0] == [b"\0\xff%d" % number for number in range(size)]
    assert [len(each) for each in found[0][1]] == [100_000 * number for number in range(size)]
    assert len(found[0][2]) == 32


def test_ranks_exchange_bytes_and_share_a_secret(server: MeetingServer) -> None:
    meet(server)


def test_each_world_has_a_secret_of_its_own(server: MeetingServer) -> None:
    found = [join(server, 0, 2, generation=number).secret for number in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_a_rank_that_does_not_come_is_named(server: MeetingServer) -> None:
    with pytest.raises(DeadlineError, match=r"rank 0 waits for ranks 1, 2 of 3 to join"):
        join(server, 0, 3, timeout=0.4).all_gather(b"")


def test_a_failure_reaches_those_who_wait_and_those_who_come(server: MeetingServer) -> None:
    waiting = join(server, 0, 3)

    def wait(_: int) -> None:
        with pytest.raises(PeerError, match="boom") as caught:
            waiting.all_gather(b"")
        assert caught.value.rank == 2

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait, 0)
        with contextlib.closing(MeetingClient(server.address)) as client:
            report_failure(client, 2, "boom")
        done.result(20)
    with pytest.raises(PeerError, match="boom"):
        join(server, 1, 3).all_gather(b"")


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((1, 3), "rank 1 was started twice: process [0-9]+ on .* both say that they are rank 1"),
        ((1, 4), "rank 1 was told WORLD_SIZE=4, rank 1 3"),
        ((3, 4), "rank 3 was told WORLD_SIZE=4, rank 1 3"),
    ],
)
def test_ranks_that_contradict_each_other_are_all_told(
    server: MeetingServer, second: tuple[int, int], expected: str
) -> None:
    first = join(server, 1, 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.all_gather, b"one")
        await_arrival(server)
        for rank, size in (second, (0, 3)):
            with pytest.raises(LaunchError, match=expected):
                join(server, rank, size).all_gather(b"another")
        with pytest.raises(LaunchError, match=expected):
            waiting.result(20)


def test_one_rank_too_many_leaves_a_whole_world_alone(server: MeetingServer) -> None:
    both = [join(server, rank, 2) for rank in range(2)]
    assert on_all(2, lambda rank: both[rank].all_gather(b"%d" % rank)) == [[b"0", b"1"]] * 2
    for rank, size, expected in ((1, 2, "rank 1 was started twice"), (0, 3, "WORLD_SIZE=3")):
        with pytest.raises(LaunchError, match=expected):
            join(server, rank, size).all_gather(b"late")
    assert on_all(2, lambda rank: both[rank].all_gather(b"%d" % rank)) == [[b"0", b"1"]] * 2


def test_a_rank_that_was_stopped_may_come_again(server: MeetingServer) -> None:
    with pytest.raises(DeadlineError):
        join(server, 1, 2, timeout=0.2).all_gather(b"first")
    _clients.pop().close()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(join(server, 0, 2).all_gather, b"zero")
        await_arrival(server, rank=0)
        while 1 in server._rounds[1, 1].came:  # that the first hung up is news to the server
            threading.Event().wait(0.01)
        assert join(server, 1, 2).all_gather(b"again") == [b"zero", b"again"]
        assert zero.result(20) == [b"zero", b"again"]


def await_arrival(server: MeetingServer, rank: int = 1) -> None:
    while not any(rank in found.came for found in server._rounds.values()):
        threading.Event().wait(0.01)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_server_for_one_world_ends_with_its_joining(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    server = one_server(kind, "token", generation=1)
    with pytest.raises(NotThereYet, match="the world before"):
        MeetingClient(server.address, generation=2)
    on_all(2, lambda rank: join(server, rank, 2, generation=1).joined())
    server._thread.join(20)
    assert not server._thread.is_alive()
    with pytest.raises(NotThereYet):
        MeetingClient(server.address)
    server.close()


def test_a_server_that_ends_is_no_reason_to_wait(server: MeetingServer) -> None:
    bootstrap = join(server, 0, 2, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bootstrap.all_gather, b"")
        server.close()
        with pytest.raises(MeetingGone, match="is gone"):
            waiting.result(20)
    with pytest.raises(DeadlineError, match="Has it been started"):
        find_server(server.address, 1, 2, 0.3, 1)


def test_a_host_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrapping, "_UNKNOWN_HOST_S", 0.1)
    with pytest.raises(LaunchError, match="MASTER_ADDR") as caught:
        find_server("tcp:no.such.host.invalid:4000", 1, 2, 60, 1)
    assert caught.value.__suppress_context__
    assert "no.such.host.invalid" in str(caught.value)


def test_that_rank_0_never_came_is_told_without_what_led_to_it() -> None:
    with pytest.raises(DeadlineError, match="rank 1 waits for rank 0 of 2") as caught:
        find_server(places.unix_address("nobody"), 1, 2, 0.1, 1)
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_nodes_are_counted_once(server: MeetingServer) -> None:
    with contextlib.closing(MeetingClient(server.address)) as client:
        for _ in range(3):
            client.tell({"kind": "ended", "node": 1})
            client.reply(10)
    assert server.num_ended() == 1


# Strangers on the network -----------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "another token"])
def test_without_the_token_nothing_is_read_or_written(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_server("tcp", "the token") as server:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(LaunchError, match=TOKEN_VARIABLE):
            MeetingClient(server.address)
        monkeypatch.setenv(TOKEN_VARIABLE, "the token")
        meet(server)


def test_a_stranger_that_listens_in_place_of_the_server_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    with one_server("tcp", "guessed") as stranger, pytest.raises(LaunchError, match="prove"):
        MeetingClient(stranger.address)


@pytest.mark.parametrize("token", [None, "the token", "another"], ids=["same", "next", "other"])
def test_what_was_overheard_is_of_no_use(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a rank said, said again to this run, to the next, and to one of another token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    with (
        one_server("tcp", "the token") as server,
        recorder(places.host_and_port(server.address)) as (port, overheard),
    ):
        client = MeetingClient(places.tcp_address("127.0.0.1", port))
        report_failure(client, 0, "said once")
        client.close()
        assert server._failure == {"rank": 0, "reason": "said once"}
        server._failure = None
        if token is None:
            say_again(server, overheard)
    if token is not None:
        with one_server("tcp", token) as following:
            say_again(following, overheard)
            monkeypatch.setenv(TOKEN_VARIABLE, token)
            meet(following)


def say_again(server: MeetingServer, overheard: bytearray) -> None:
    place = places.host_and_port(server.address)
    answers = b""
    with socket.create_connection(place, 20) as again, contextlib.suppress(OSError):
        again.sendall(bytes(overheard))
        while data := again.recv(4096):
            answers += data
    assert len(answers) <= 64  # a random number and a proof, and no word after the handshake
    assert server._failure is None


GARBAGE = """
import socket, sys
kind, place, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
words = [b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\xff" * 4096, b"shoal\\0\\0\\1" + bytes(40)]
kept = []
for number in range(count):
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        place_ = "\\0" + place
    else:
        sock = socket.socket()
        host, port = place.rsplit(":", 1)
        place_ = (host, int(port))
    sock.settimeout(20)
    try:
        sock.connect(place_)
        sock.send(words[number % len(words)])
        if number % 100 == 0:
            kept.append(sock)  # says no more
        else:
            sock.close()
    except OSError:
        sock.close()
print("done")
"""


def of_stranger(server: MeetingServer) -> tuple[str, str]:
    kind, _, place = server.address.partition(":")
    return kind, place.removeprefix("@")


def used() -> tuple[int, int]:
    """Descriptors, and pages of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages


@pytest.mark.parametrize("kind", [pytest.param(each, marks=as_root) for each in ("unix", "tcp")])
def test_a_crowd_of_strangers_costs_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    with one_server(kind, "the token") as server:
        meet(server)
        before = used()
        with caplog.at_level(logging.WARNING):
            assert run_stranger(GARBAGE, *of_stranger(server), str(CROWD), timeout=100) == "done\n"
            meet(server)
        after = used()
        assert after[0] - before[0] <= MeetingServer.most_unproven + 8
        assert (after[1] - before[1]) * os.sysconf("SC_PAGE_SIZE") < 16 << 20
    assert len(caplog.records) == 1
    assert "dropped a connection" in caplog.text


# Strangers on the same host ---------------------------------------------------------------

CALL = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(20)
    sock.connect("\\0" + sys.argv[1])
    try:
        sock.send(b"{}")
        print(sock.recv(4096))
    except OSError as error:
        print(b"")
"""

SQUAT = """
import socket, sys, time
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind("\\0" + sys.argv[1])
    sock.listen()
    print("squatting", flush=True)
    sys.stdin.read()
"""


class TestAnotherUser:
    pytestmark = as_root

    def test_is_told_nothing(self) -> None:
        with one_server("unix", "") as server:
            assert run_stranger(CALL, of_stranger(server)[1]) == "b''\n"
            meet(server)

    def test_who_holds_the_name_is_named_to_all(self) -> None:
        address = places.unix_address(secrets.token_hex(8))
        process = start_stranger(SQUAT, address.removeprefix("unix:@"))
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "squatting\n"
            with pytest.raises(LaunchError, match=r"another user \(uid 65534\) holds that name"):
                MeetingServer.on_one_host(address)
            with pytest.raises(LaunchError, match=r"another user \(uid 65534\) holds that name"):
                MeetingClient(address)
        finally:
            end(process)


def test_descriptors_of_the_standard_streams_are_left_alone() -> None:
    """Where they are closed, the first sockets get their numbers."""
    body = (
        "import os; [os.close(fd) for fd in (0, 1, 2)]\n"
        "from shoal.meeting.server import MeetingServer\n"
        "from shoal.meeting.client import MeetingClient\n"
        "server = MeetingServer.on_one_host()\n"
        "client = MeetingClient(server.address)\n"
        "low = [server._listener.fileno(), client._socket.fileno()]\n"
        "client.close(); server.close()\n"
        "os._exit(0 if min(low) > 2 else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", body], check=False, timeout=30).returncode == 0

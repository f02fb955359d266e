"""Gloo's ports are open to all: whoever stands in for a rank there is found out, and named."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import leaks
import shoal
from control_worlds import InnerBootstrap
from meeting.strangers import CROWD, as_root, end, start_stranger
from shoal.comm.bootstrap.connect import connect_backend
from shoal.comm.torch_groups import groups
from shoal.comm.torch_groups.port import MOST_STRANGERS
from shoal.errors import PeerError, ShoalError, TransportError
from shoal.launch.function.forkserver.forkserver import fork_server


@pytest.fixture(scope="module", autouse=True)
def forkserver_is_up() -> None:
    fork_server()
    leaks.baseline()


# Calls each port first, in place of every rank that Gloo may expect there, and answers whatever
# it is sent with as many bytes of its own.
FIRST = """
import select, socket, struct, sys
socks = []
for port in sys.argv[1:]:
    for number in range(4):
        sock = socket.create_connection(("127.0.0.1", int(port)), 10)
        sock.sendall(struct.pack("<Q", number))
        socks.append(sock)
print("first", flush=True)
while socks:
    for sock in select.select(socks, [], [], 60)[0]:
        try:
            data = sock.recv(4096)
            sock.sendall(b"A" * len(data))
        except OSError:
            data = b""
        if not data:
            socks.remove(sock)
"""


def own_ports() -> list[str]:
    """Where this process listens for TCP."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        str(int(row[1].partition(":")[2], 16))
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    ]


def be_called_first() -> list[Any]:
    """When Gloo's ports open, and before a rank may call them, a stranger is there already."""
    started: list[subprocess.Popen[str]] = []
    honest = groups.GroupExchange.__call__

    def late(self: Any, data: bytes, patience: Any) -> list[bytes]:
        if not data:
            started.append(arrived(start_stranger(FIRST, *own_ports()), "first"))
        return honest(self, data, patience)

    groups._PROOF_S = 4.0
    groups.GroupExchange.__call__ = late  # type: ignore[method-assign]
    return connect_and_sum(started)


def arrived(process: subprocess.Popen[str], word: str) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{word}\n"
    return process


def connect_and_sum(started: list[subprocess.Popen[str]]) -> list[Any]:
    try:
        with connect_backend("gloo", InnerBootstrap(shoal.world()), 30.0) as backend:
            return ["connected", backend.all_reduce(torch.ones(2)).tolist()]
    except (TransportError, PeerError) as error:
        return ["refused", str(error)]
    finally:
        shoal.world().barrier()
        for process in started:
            end(process)


class TestWhoCallsFirst:
    pytestmark = as_root

    def test_is_no_rank(self) -> None:
        """Either the real rank won, and numbers are right, or all are told of the stranger."""
        results = shoal.run(be_called_first, ranks=2, backend="shm", timeout=40)
        assert results != [["connected", [2.0, 2.0]]] * 2, "no stranger came through to Gloo"
        assert [kind for kind, _ in results] == ["refused", "refused"], results
        assert any("stranger" in text for _, text in results), results


def with_another_secret() -> str:
    """A rank whose connection leads to somebody that does not know the secret."""
    bootstrap = InnerBootstrap(shoal.world())
    if shoal.world().rank == 1:
        bootstrap.secret = bytes(32)
    try:
        connect_backend("gloo", bootstrap, 30.0).shutdown()
    except ShoalError as error:
        return str(error)
    finally:
        shoal.world().barrier()
    return "connected"


def test_a_wrong_proof_is_an_error_on_every_rank() -> None:
    found = shoal.run(with_another_secret, ranks=2, backend="shm", timeout=40)
    for text in found:
        assert "a stranger is connected" in text
        assert "does not know the run's secret" in text


def no_store_is_open() -> list[str]:
    shoal.world().barrier()
    listening = own_ports()
    shoal.world().barrier()
    return listening


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_on_one_host_only_gloo_itself_listens(backend: str) -> None:
    found = shoal.run(no_store_is_open, ranks=2, backend=backend, timeout=30)
    assert all(len(ports) == (backend == "gloo") for ports in found), found


# Crowds -----------------------------------------------------------------------------------

MANY, FEW = 10_000, 200
FEW_DESCRIPTORS = 1024  # what most systems give a process
MORE_DESCRIPTORS = 6 * 1024  # a crowd is looked for now and then; this machine may be busy
ENOUGH_MORE = 8  # what a rank may open meanwhile on its own account


def used() -> tuple[int, int]:
    """Descriptors of this process, and MiB of its memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") >> 20


def train_in_a_crowd() -> dict[str, Any]:
    """All-reduces until strangers have called all ports so many times."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    world = shoal.world()
    part = world.backend.subgroup([0, 1])
    ports = [port for each in world.all_gather_object(own_ports()) for port in each]
    world.all_reduce(torch.ones(2))
    before = used()
    strangers = None if world.rank else start_stranger(CROWD, str(MANY), "0", *ports)
    sums, is_over = set(), False
    while not is_over:
        sums |= {part.all_reduce(torch.ones(2)).sum().item()}
        done = strangers and select.select([strangers.stdout], [], [], 0)[0]
        is_over = world.all_reduce(torch.tensor(float(bool(done)))).item() > 0
    if strangers is not None:
        arrived(strangers, "0")
        end(strangers)
    after = used()
    grown = [now - then for now, then in zip(after, before, strict=True)]
    return {"ports": len(ports), "sums": sums, "descriptors": grown[0], "MiB": grown[1]}


class TestACrowd:
    pytestmark = as_root

    def test_costs_a_world_that_trains_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Each of the four ports is called by more than a process may have descriptors."""
        for found in shoal.run(train_in_a_crowd, 2, "gloo", timeout=40):
            assert found["ports"] == 4
            assert found["sums"] == {4.0}
            assert found["descriptors"] <= ENOUGH_MORE
            assert found["MiB"] <= 16
        assert capfd.readouterr().err == ""

    def test_while_ranks_connect_is_an_error_in_words(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        begin = time.monotonic()
        results = shoal.run(connect_in_a_crowd, 2, "shm", args=(MANY,), timeout=40)
        assert [kind for kind, _ in results] == ["refused", "refused"], results
        assert any("more than 256 strangers have called rank 0" in text for _, text in results)
        assert time.monotonic() - begin < 20
        assert len(capfd.readouterr().err.splitlines()) <= 3

    def test_of_a_few_while_ranks_connect_changes_nothing(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        results = shoal.run(connect_in_a_crowd, 2, "shm", args=(FEW,), timeout=40)
        assert results == [["connected", [2.0, 2.0]]] * 2
        assert capfd.readouterr().err == ""


def connect_in_a_crowd(count: int) -> list[Any]:
    """Rank 1 is late for rank 0, whose port is open meanwhile."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MORE_DESCRIPTORS, MORE_DESCRIPTORS))
    world, started = shoal.world(), []
    honest = groups.GroupExchange.__call__

    def late(self: Any, data: bytes, patience: Any) -> list[bytes]:
        if data:
            return honest(self, data, patience)
        ports = honest(self, b"".join(port.encode() for port in own_ports()), patience)
        if world.rank:
            crowd = start_stranger(CROWD, str(count), "1", ports[0].decode())
            started.append(crowd)
            assert crowd.stdout is not None
            # Rank 0 closes its port as soon as it has seen that these are too many.
            assert int(crowd.stdout.readline()) > min(count // 10, MOST_STRANGERS + world.size)
        return [b""] * world.size

    groups.GroupExchange.__call__ = late  # type: ignore[method-assign]
    return connect_and_sum(started)

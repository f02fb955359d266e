"""Calls that other ranks' threads handle: values there and back, errors, and many at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import pools
import shoal
from shoal.comm.peer_tensors.client import TensorClient, Whereabouts
from shoal.comm.peer_tensors.lending import Answer
from shoal.comm.peer_tensors.server import TensorServer
from shoal.errors import PeerError, ShoalError
from shoal.system.deadline import Deadline

pytestmark = pytest.mark.timeout(60)


class Adder:
    """Adds up what it is sent."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.lock = threading.Lock()

    def find(self, key: str) -> None:
        return None

    def listing(self) -> list[list[Any]]:
        return []

    def handle(self, request: dict[str, Any], values: Tensor | None) -> Answer:
        if request["kind"] == "fail":
            raise ValueError("no such thing")
        if values is None:
            return Answer({"has": "nothing"})
        with self.lock:
            self.total += values[:3].sum()
        return Answer({"shape": list(values.shape)}, 2 * values)


def talk() -> Any:
    world = shoal.world()
    source = Adder()
    peers = world.backend.lend(source)
    found = []
    for rank in range(world.size):
        for count in (0, 3, 300_000):
            values = torch.full((count,), 1.0 + world.rank, dtype=torch.float64)
            answer = peers.call(rank, {"kind": "add"}, values, Deadline(30))
            assert answer.data == {"shape": [count]}
            assert answer.values is not None
            found.append(bool((answer.values == 2 * values).all()))
        assert peers.call(rank, {"kind": "ask"}, None, Deadline(30)) == ({"has": "nothing"}, None)
        with pytest.raises((ShoalError, ValueError), match="no such thing"):
            peers.call(rank, {"kind": "fail"}, None, Deadline(30))
    world.barrier()
    peers.close()
    return all(found), source.total.tolist()


@pytest.mark.parametrize("team", [pools.Team("memory", 3), pools.Team("shm", 3)], ids=str)
def test_values_there_and_back(team: pools.Team) -> None:
    # Two calls of each rank that have three elements or more.
    assert team.run(talk) == [(True, [2.0 * 3 * (1 + 2 + 3)] * 3)] * 3


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["one-host", "between-hosts"])
def test_one_server_and_many_threads(host: str | None) -> None:
    source = Adder()
    server = TensorServer(0, b"secret", host)
    server.sources[0] = source
    where = Whereabouts(server.address, server.token)
    clients = [TensorClient(rank, 0, where, b"secret") for rank in range(1, 5)]
    answers: list[Any] = []

    def ask(client: TensorClient) -> None:
        for _ in range(5):
            request = {"lending": 0, "kind": "call", "request": {"kind": "add"}}
            answers.append(client.ask(request, lambda: None, torch.ones(50_000)))

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for client in clients:
            client.close()
        server.close()
    assert len(answers) == 20
    assert all(header["answer"] == {"shape": [50_000]} for header, _ in answers)
    assert all(bool((values == 2).all()) for _, values in answers)
    assert source.total.tolist() == [60.0] * 3


def test_values_that_were_changed_on_the_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Adder()
    server = TensorServer(0, b"secret", "127.0.0.1")
    server.sources[0] = source
    client = TensorClient(1, 0, Whereabouts(server.address, server.token), b"secret")
    monkeypatch.setattr(
        "shoal.comm.peer_tensors.client.description",
        lambda tensor, memory, is_one_host: {
            "dtype": "float32", "shape": [4], "bytes": 16, "digest": "0" * 64
        },
    )  # fmt: skip
    monkeypatch.setattr("shoal.comm.peer_tensors.client._NEWS_S", 0.1)
    request = {"lending": 0, "kind": "call", "request": {"kind": "add"}}
    try:
        with pytest.raises(PeerError, match="connection for tensors ended"):
            client.ask(request, lambda: None, torch.ones(4))
    finally:
        client.close()
        server.close()
    assert source.total.tolist() == [0.0] * 3

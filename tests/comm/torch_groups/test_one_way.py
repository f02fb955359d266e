"""Messages that share a communicator, over Gloo: NCCL needs GPUs."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.comm import Work
from shoal.comm.control.page import page
from shoal.comm.torch_groups import gloo
from shoal.comm.torch_groups.nccl import NCCLBackend
from shoal.comm.torch_groups.one_way import OneWay
from shoal.errors import MismatchError
from shoal.launch.function.forkserver.forkserver import fork_server

NUM_MESSAGES = 30


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked() -> None:
    """From a process that stays."""
    fork_server()


class OneWayGloo(gloo.GlooBackend):
    """Gloo that sends messages as NCCL does."""

    _device = torch.device("cpu")
    _send, _recv = NCCLBackend._send, NCCLBackend._recv  # type: ignore[assignment]
    _number_message, _end_message = NCCLBackend._number_message, NCCLBackend._end_message  # type: ignore[assignment]
    _prepare_message = NCCLBackend._prepare_message  # type: ignore[assignment]
    _one_way, _connect_one_way = NCCLBackend._one_way, NCCLBackend._connect_one_way  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._one_ways: dict[tuple[str, int], OneWay] = {}
        self._one_ways_lock = threading.Lock()

    def _check_verdict(self) -> None:
        """A CPU does not go on with results that mean nothing."""


def contents(sender: int, receiver: int, tag: int) -> Tensor:
    """Of various lengths; every fifth has none."""
    return torch.full((tag % 5 * 10,), 100.0 * sender + 10 * receiver + tag)


def exchange(seed: int) -> int:
    """All ranks to all, called in an order of each rank's own."""
    usual, gloo.GlooBackend = gloo.GlooBackend, OneWayGloo  # type: ignore[misc]
    shoal.world().shutdown()
    try:
        with shoal.init("gloo", 30.0) as world:
            return _exchange(world, random.Random(seed + world.rank))
    finally:
        gloo.GlooBackend = usual  # type: ignore[misc]


def _exchange(world: Any, order: random.Random) -> int:
    rank, size = world.rank, world.size
    calls = [
        (is_send, peer, tag)
        for is_send in (True, False)
        for peer in range(size)
        if peer != rank
        for tag in range(NUM_MESSAGES)
    ]
    order.shuffle(calls)
    works: list[tuple[Work[Any], Tensor | None]] = []
    for is_send, peer, tag in calls:
        if is_send:
            work = world.send(contents(rank, peer, tag), peer, tag, async_op=True)
            works.append((work, None))
        else:
            work = world.recv(src=peer, tag=tag, async_op=True)
            works.append((work, contents(peer, rank, tag)))
    for work, expected in works:
        found = work.wait()
        assert expected is None or torch.equal(found, expected)
    with pytest.raises(MismatchError):  # gives up its number on both sides
        world.send(torch.ones(2), 1) if rank == 0 else world.recv(torch.ones(3), src=0)
    if rank == 0:
        world.send(torch.ones(4), 1)
    else:
        assert world.recv(src=0).tolist() == [1] * 4
    one_ways = world.backend._one_ways
    return sum(each.group is not None for each in one_ways.values())


def send_many(count: int, places: int) -> bool:
    """More than may be offered at once: those that wait for their turn hold their places."""
    usual, gloo.GlooBackend = gloo.GlooBackend, OneWayGloo  # type: ignore[misc]
    usual_places, page.MESSAGES = page.MESSAGES, places
    shoal.world().shutdown()
    try:
        with shoal.init("gloo", 60.0) as world:
            tags = range(count)
            if world.rank == 0:
                works = [world.send(torch.tensor(n), 1, n, async_op=True) for n in tags]
            else:
                works = [world.recv(src=0, tag=n, async_op=True) for n in tags]
            values = [work.wait() for work in works]
            return world.rank == 0 or values == list(tags)
    finally:
        gloo.GlooBackend, page.MESSAGES = usual, usual_places  # type: ignore[misc]


def test_more_messages_than_places() -> None:
    assert shoal.run(send_many, 2, "gloo", args=(30, 8)) == [True, True]


@pytest.mark.parametrize("seed", range(2))
def test_messages_in_any_order_share_a_communicator(seed: int) -> None:
    assert shoal.run(exchange, 2, "gloo", args=(seed,)) == [2, 2]


def test_numbers_that_were_given_up_are_passed_over() -> None:
    one_way = OneWay(1, lambda _: None)
    first, second, third = one_way.meet(), one_way.meet(), one_way.meet()
    one_way.end(second)
    assert one_way._num_over == 0
    one_way.end(first)
    assert one_way._num_over == 2
    one_way.await_turn(third, None)  # type: ignore[arg-type]  # does not wait

"""Ranks agree on a backend before one is made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.comm.bootstrap.bootstrap import MeetingBootstrap
from shoal.comm.bootstrap.connect import connect_backend
from shoal.errors import MismatchError
from shoal.meeting.client import MeetingClient
from shoal.meeting.server import MeetingServer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["shm", "gloo"], "rank 0 for shm, rank 1 for gloo"),
        (["gloo", "shm", "shm", "shm"], "rank 0 for gloo, ranks 1-3 for shm"),
    ],
)
def test_different_backends_are_an_error_at_once_on_every_rank(
    names: Sequence[str], expected: str
) -> None:
    def rank(number: int) -> None:
        with contextlib.closing(MeetingClient(server.address)) as client:
            bootstrap = MeetingBootstrap(client, (number, len(names)), 60.0)
            with pytest.raises(MismatchError, match=expected):
                connect_backend(names[number], bootstrap, 60.0)

    with MeetingServer.on_one_host() as server, ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(rank, range(len(names)), timeout=30))

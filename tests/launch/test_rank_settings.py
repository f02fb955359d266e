"""The C library's settings reach the ranks, and a user's own stay."""

from __future__ import annotations

import os

import pytest

import leaks
import shoal
from shoal.comm.bootstrap.store import store_for_one_host
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.rank_settings import tunables

_LENGTH = "glibc.cpu.x86_non_temporal_threshold"


def test_length_of_long_copies_is_set() -> None:
    assert tunables({}) == {"GLIBC_TUNABLES": f"{_LENGTH}=1048576"}


def test_other_choices_stay() -> None:
    env = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert tunables(env) == {"GLIBC_TUNABLES": f"glibc.malloc.check=0:{_LENGTH}=1048576"}


def test_length_that_the_user_chose_stays() -> None:
    assert tunables({"GLIBC_TUNABLES": f"{_LENGTH}=4096000"}) == {}


@pytest.mark.parametrize("backend", ["shm", "mpi"])
def test_ranks_are_started_with_it(backend: str) -> None:
    fork_server()
    store_for_one_host()
    leaks.baseline()
    for found in shoal.run(lambda: os.environ["GLIBC_TUNABLES"], ranks=2, backend=backend):
        assert _LENGTH in found

"""Threads and settings of the C library reach the ranks, and a user's own choices stay."""

from __future__ import annotations

import os

import pytest

import leaks
import shoal
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.rank_settings import rank_settings, threads_of, tunables
from shoal.system.libc import num_cores

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
    leaks.baseline()
    for found in shoal.run(lambda: os.environ["GLIBC_TUNABLES"], ranks=2, backend=backend):
        assert _LENGTH in found


def test_cores_are_shared_out() -> None:
    assert rank_settings(1, {})["OMP_NUM_THREADS"] == str(num_cores())
    assert rank_settings(10**6, {})["OMP_NUM_THREADS"] == "1"
    assert rank_settings(2, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("text", "count"), [("3", 3), (" 4,2", 4), ("", None), ("0", None), ("many", None)]
)
def test_threads_are_read_back(text: str, count: int | None) -> None:
    assert threads_of({"OMP_NUM_THREADS": text}) == count

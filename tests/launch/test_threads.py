"""Ranks that are threads."""

from __future__ import annotations

import os
import threading
import time

import torch

import shoal


class Slow:
    """Takes its time to go."""

    def __del__(self) -> None:
        time.sleep(0.3)


def leave_something_in_the_thread() -> int:
    torch._C._stash_obj_in_tls("slow", Slow())
    return threading.get_native_id()


def test_threads_of_ranks_have_exited_when_a_run_returns() -> None:
    """One that drops a Python object while the interpreter shuts down aborts the process.

    torch 2.12 leaves such an object in each thread that ran a backward.
    """
    ranks = shoal.run(leave_something_in_the_thread, 2, "memory")
    assert set(map(str, ranks)).isdisjoint(os.listdir("/proc/self/task"))

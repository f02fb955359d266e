"""Runs one function on ranks that are threads of this process and take turns."""

from __future__ import annotations

import contextvars
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from shoal.comm.backend import WorldState
from shoal.comm.memory.backend import InMemoryBackend, Simulator
from shoal.comm.world import World, set_current
from shoal.errors import DeadlineError
from shoal.launch.function.call import copy_call
from shoal.launch.function.outcome import Outcome
from shoal.system.deadline import wait_until
from shoal.torch_support.random_state import RandomState

# How long ranks get to come to their next operation, where they end, after an interrupt.
_GRACE_S = 2.0
_POLL_S = 0.001

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


def run_threads(
    fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, timeout: float
) -> list[Outcome]:
    """Runs ``fn(*args)`` on ``ranks`` threads; each gets its own copy, as processes would."""
    simulator = Simulator(ranks, timeout)
    outcomes = [Outcome(rank, failed_at=time.monotonic()) for rank in range(ranks)]
    threads = [
        threading.Thread(
            target=contextvars.Context().run,
            args=(_run_rank, copy_call(fn, args), simulator, outcomes[rank], timeout),
            name=f"shoal-rank-{rank}",
            daemon=True,
        )
        for rank in range(ranks)
    ]
    random = RandomState.capture()
    try:
        for thread in threads:
            thread.start()
        _join(threads, simulator)
    except DeadlineError:
        raise
    except BaseException as error:
        simulator.interrupt(error)
        _join_for(threads, _GRACE_S)
        raise
    finally:
        random.restore()
    return outcomes


def _run_rank(call: _Call, simulator: Simulator, outcome: Outcome, timeout: float) -> None:
    ranks = range(simulator.size)
    world = World(InMemoryBackend(WorldState(timeout=timeout), simulator, ranks, outcome.rank))
    set_current(world, process_wide=False)
    # Until a new thread has asked for it, its matrix products take another number of threads than
    # was set, and round differently.
    torch.get_num_threads()
    # Autograd has one backward thread per device. Ranks that are threads would share it, and
    # a hook that waits for another rank there would stop that rank's backward as well.
    with torch.autograd.set_multithreading_enabled(False):
        try:
            simulator.enter(outcome.rank)
            fn, args = call
            outcome.value = fn(*args)
            world.shutdown()
            outcome.failed_at = None
        except BaseException as error:
            outcome.error, outcome.failed_at = error, time.monotonic()
            outcome.traceback = "".join(traceback.format_exception(error))
            world.fail(error)
        finally:
            world.shutdown()
            simulator.exit(outcome.rank)


def _join(threads: list[threading.Thread], simulator: Simulator) -> None:
    """Waits for all; once the others gave up on a rank that does not end, so does the caller."""
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            if simulator.is_abandoned(thread.is_alive() for thread in threads):
                raise simulator.abandoned()
    _wait_for_exit(threads)


def _wait_for_exit(threads: list[threading.Thread]) -> None:
    """Waits until the system has ended the threads too; before Python 3.13 `join` returns earlier.

    torch 2.12 leaves a Python object in each thread that ran a backward, and takes the GIL to drop
    it when the thread exits. If the interpreter is shutting down by then, the process aborts.
    """
    deadline = time.monotonic() + _GRACE_S
    for thread in threads:
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S / 20)  # a matter of microseconds


def _join_for(threads: list[threading.Thread], seconds: float) -> None:
    """Waits for a while. An interrupted `join` may take a running thread for a stopped one."""
    wait_until(lambda: not set(threads) & set(threading.enumerate()), seconds, _POLL_S)

"""Runs one function on several ranks, be they threads, processes of this host, or `mpiexec`'s."""

from __future__ import annotations

import contextvars
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.comm.memory.backend import InMemoryBackend, Simulator
from shoal.comm.world import World, set_current
from shoal.comm.world_state import WorldState
from shoal.errors import DeadlineError, LaunchError
from shoal.launch.function.call import WORKER, copy_call, encode_call, will_use_compiler
from shoal.launch.function.collector import Collector
from shoal.launch.function.connect_back import run_command
from shoal.launch.function.elastic_processes import run_elastic_processes
from shoal.launch.function.elastic_threads import run_elastic_threads
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.outcome import Outcome
from shoal.launch.joining.environment import without_rank
from shoal.launch.mpi import mpiexec
from shoal.launch.rank_settings import rank_settings
from shoal.meeting.address import MEETING_VARIABLE, free_port
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import PERSON_VARIABLE
from shoal.meeting.server import MeetingServer
from shoal.system.deadline import wait_until
from shoal.system.memory_file import MemoryFile
from shoal.torch_support.random_state import RandomState

# How long threads get to come to their next operation, where they end, after an interrupt.
_GRACE_S = 2.0
_POLL_S = 0.001

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


def run_outcomes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    backend: str,
    timeout: float,
    elastic: Elastic | None = None,
) -> list[Outcome]:
    """What became of each rank; failures are outcomes, not exceptions."""
    if backend == "memory":
        if elastic is not None:
            return run_elastic_threads(fn, args, ranks, timeout, elastic)
        return run_threads(fn, args, ranks, timeout)
    settings = _settings(ranks, backend, timeout)
    if elastic is not None and backend == "mpi":
        raise LaunchError(
            "shoal.run(..., elastic=...) takes memory, shm and gloo. Over MPI a run whose ranks "
            "may be lost is started by: shoal launch --elastic --backend mpi SCRIPT"
        )
    if elastic is not None:
        return run_elastic_processes(fn, args, ranks, settings, elastic)
    if backend == "mpi":
        command, variables = mpiexec.command(ranks)
        env = {**without_rank(os.environ), **settings, **variables}
        return run_command(command, env, fn, args, ranks)
    return _run_processes(fn, args, ranks, settings)


def _settings(ranks: int, backend: str, timeout: float) -> dict[str, str]:
    return {
        "SHOAL_BACKEND": backend,
        "SHOAL_TIMEOUT": str(timeout),
        "SHOAL_RUN_ID": secrets.token_hex(8),
        PERSON_VARIABLE: "",  # that of an elastic worker which is the caller
        **rank_settings(ranks, os.environ),
    }


def _run_processes(
    fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, settings: dict[str, str]
) -> list[Outcome]:
    with MeetingServer.on_one_host() as server:
        return _run_processes_at(server, fn, args, ranks, settings)


def _run_processes_at(
    server: MeetingServer,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    settings: dict[str, str],
) -> list[Outcome]:
    host, port = free_port()  # for what the function does with torch itself

    def variables(rank: int) -> dict[str, str]:
        return {
            **settings,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "SHOAL_LAUNCHED": "1",
            MEETING_VARIABLE: server.address,
        }

    def tell_others(rank: int, code: int) -> None:
        """A rank that ended before it joined is on no control plane: the server knows."""
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        server.report_failure(rank, f"its process {how} before it joined")

    return run_processes(fn, args, ranks, env_for=variables, on_exit=tell_others)


def run_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    *,
    entry: str = WORKER,
    env_for: Callable[[int], Mapping[str, str]],
    grace: float = 10.0,
    on_exit: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Runs `fn(*args)` on `ranks` processes and returns their outcomes, in order of rank.

    Failures are outcomes, not exceptions. An exception in this process (Ctrl-C among them) kills
    every rank before it goes on its way.

    Args:
        fn: Any function that cloudpickle can carry.
        args: The same for every rank.
        ranks: How many.
        entry: Called in each process as `entry(channel, payload)`: decodes the call, makes it and
            reports with `send_value` or `send_error`.
        env_for: The variables that a rank sees over those of this process.
        grace: How long the others may run on after the first failure before they are killed.
        on_exit: Called with rank and exit code as soon as a process has ended, whatever the code.
    """
    server = fork_server()
    call = encode_call(fn, args)
    if will_use_compiler(call):
        server.load_compiler()
    with MemoryFile(call) as payload, Collector(ranks, grace, on_exit) as collector:
        for rank in range(ranks):
            child = server.spawn(entry, payload, {**os.environ, **env_for(rank)})
            collector.add(rank, child.channel, child)
        outcomes = collector.run()
    if any(outcome.used_compiler for outcome in outcomes):
        server.load_compiler()  # the next call will need it as well
    return outcomes


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

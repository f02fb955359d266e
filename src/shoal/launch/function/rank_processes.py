"""Runs one function on several ranks, each a process of this host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from shoal.launch.function.call import encode_call
from shoal.launch.function.collector import Collector
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.outcome import Outcome
from shoal.system.memory_file import MemoryFile

WORKER = "shoal.launch.function.worker:main"


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
        args: Its arguments, the same for every rank.
        ranks: How many processes to start.
        entry: Called in each process as `entry(channel, payload)`: decodes the call, makes it and
            reports with `send_value` or `send_error`.
        env_for: The variables that a rank sees over those of this process.
        grace: How long the others may run on after the first failure before they are killed.
        on_exit: Called with rank and exit code as soon as a process has ended, whatever the code.
    """
    server = fork_server()
    payload = MemoryFile(encode_call(fn, args))
    with payload, Collector(ranks, grace, on_exit) as collector:
        for rank in range(ranks):
            child = server.spawn(entry, payload, {**os.environ, **env_for(rank)})
            collector.add(rank, child.channel, child)
        return collector.run()

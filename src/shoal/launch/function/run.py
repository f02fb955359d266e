"""Runs a function on ranks of any kind, and tells the others of a rank that never joined."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from shoal.comm.bootstrap.store import report_failure, store_for_one_host
from shoal.launch.function.command.connect_back import run_command
from shoal.launch.function.outcome import Outcome
from shoal.launch.function.rank_processes import run_processes
from shoal.launch.function.rank_threads import run_threads
from shoal.launch.joining.join import news_of_run
from shoal.launch.mpi import mpiexec
from shoal.launch.rank_settings import rank_settings


def run_outcomes(
    fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, backend: str, timeout: float
) -> list[Outcome]:
    """What became of each rank; failures are outcomes, not exceptions."""
    if backend == "memory":
        return run_threads(fn, args, ranks, timeout)
    settings = _settings(ranks, backend, timeout)
    if backend == "mpi":
        command, variables = mpiexec.command(ranks)
        env = {**os.environ, **settings, **variables}
        return run_command(command, env, fn, args, ranks)
    return _run_processes(fn, args, ranks, settings)


def _settings(ranks: int, backend: str, timeout: float) -> dict[str, str]:
    return {
        "SHOAL_BACKEND": backend,
        "SHOAL_TIMEOUT": str(timeout),
        "SHOAL_RUN_ID": secrets.token_hex(8),
        "SHOAL_TOKEN": secrets.token_hex(16),
        **rank_settings(ranks, os.environ),
    }


def _run_processes(
    fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, settings: dict[str, str]
) -> list[Outcome]:
    store, port = store_for_one_host()
    news = news_of_run(store, settings["SHOAL_RUN_ID"])

    def variables(rank: int) -> dict[str, str]:
        return {
            **settings,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SHOAL_LAUNCHED": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def tell_others(rank: int, code: int) -> None:
        """A rank that ended before it joined is on no control plane: the store knows."""
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        report_failure(news, rank, f"its process {how} before it joined")

    return run_processes(fn, args, ranks, env_for=variables, on_exit=tell_others)

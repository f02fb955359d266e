"""Starts the ranks of a script on this node and sees them through to their end.

The life of a launch: a port is bound, ranks start, the store starts beside them. Then nothing
happens here until all ranks have ended, or one failed, or someone asked to stop. In the last two
cases the others have a grace period (shoal wakes them by itself), then SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.mpi.job import MpiJob
from shoal.launch.script.config import LaunchConfig, common_variables, own_variables
from shoal.launch.script.guard import Guard, adopting_orphans
from shoal.launch.script.output import FileOutput, RankOutput, ScreenOutput, console
from shoal.launch.script.rank import Rank, start_rank
from shoal.launch.script.store_process import StoreProcess, listen
from shoal.launch.script.summary import Ending, first_failure, read_record, summarize

__all__ = ["LaunchConfig", "launch"]

_TERM_SECONDS = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_OTHER_NODES_SECONDS = 300.0


def launch(config: LaunchConfig) -> int:
    """Starts the ranks of this node and waits for them.

    Returns:
        0 if all ranks ended with 0, the code of the first that failed otherwise: 128 + n where
        signal n ended it, or the launcher itself.

    Raises:
        LaunchError: If the ranks cannot be started; none is left running then.

    Example:
        >>> launch(LaunchConfig("train.py", ("--lr", "0.1"), ranks=4))
        0
    """
    config.refuse_missing_script()
    if config.log_dir is not None:
        _make_folder(config.log_dir)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        listener = stack.enter_context(listen(config)) if config.node_rank == 0 else None
        guard = stack.enter_context(Guard(folder))
        stack.enter_context(adopting_orphans())
        return asyncio.run(_Launch(config, folder, guard).run(listener))


class _Launch:
    """One launch: its ranks, and what they share."""

    def __init__(self, config: LaunchConfig, folder: Path, guard: Guard) -> None:
        self._config = config
        self._folder = folder
        self._guard = guard
        self._ranks: list[Rank] = []
        self._job = MpiJob(config, folder) if config.backend == "mpi" else None
        self._out, self._err = console(sys.stdout, sys.stderr)

    async def run(self, listener: socket.socket | None) -> int:
        signals = Signals(self._ranks)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(signals.forwarded())
            stack.push_async_callback(self._clean_up)
            await self._start(self._config.port if listener is None else listener.getsockname()[1])
            store = StoreProcess(self._config, listener, self._folder / "store.log")
            stack.callback(store.close)
            if listener is not None:
                listener.close()  # the store has it now: if that dies, ranks are refused at once
            await self._see_through(signals)
            code = self._report(signals, store)
            await self._wait_for_nodes(signals, store, failed=code != 0)
        return code

    async def _start(self, port: int) -> None:
        config = self._config
        if config.log_dir is not None:
            self._err.say(f"shoal: {config.ranks} rank(s) write to {config.log_dir}/rank-K.log")
        env = {**os.environ, **common_variables(config, port, self._folder)}
        if self._job is not None:
            words = ScreenOutput("mpiexec", self._err, self._err)
            await self._job.start(env, words, self._output_of, self._add)
            return
        for local_rank in range(config.ranks):
            own = own_variables(config, local_rank)
            number = config.first_rank + local_rank
            stdin = None if number == 0 else subprocess.DEVNULL
            output = self._output_of(number)
            self._add(start_rank(number, config.command(), {**env, **own}, output, stdin))

    def _output_of(self, number: int) -> RankOutput:
        if self._config.log_dir is not None:
            return FileOutput(self._config.log_dir / f"rank-{number}.log")
        return ScreenOutput(f"rank {number}", self._out, self._err)

    def _add(self, rank: Rank) -> None:
        self._ranks.append(rank)
        rank.ended.add_done_callback(lambda _: self._tell_guard())
        self._tell_guard()

    def _tell_guard(self) -> None:
        groups = [rank.pid for rank in self._ranks if rank.is_running]
        self._guard.watch(groups if self._job is None else [*groups, self._job.pid])

    async def _see_through(self, signals: Signals) -> None:
        """Returns when no rank runs any more, however that came about."""
        everyone = [rank.ended for rank in self._ranks]
        await _first_of(_all_well(everyone), signals.stop.wait())
        await _first_of(_all_ended(everyone), signals.hurry.wait(), timeout=self._config.grace)
        for rank in self._ranks:
            rank.send_group(signal.SIGTERM)
        await _first_of(_all_ended(everyone), signals.hurry.wait(), timeout=_TERM_SECONDS)
        for rank in self._ranks:
            rank.send_group(signal.SIGKILL)
        await _first_of(_all_ended(everyone), timeout=_TERM_SECONDS)
        for rank in self._ranks:
            rank.end(-signal.SIGKILL)  # the kernel has it, and may never let go

    def _report(self, signals: Signals, store: StoreProcess) -> int:
        endings = [
            Ending(
                rank.number,
                rank.ended.result(),
                rank.ended_at,
                rank.output.tail(),
                read_record(self._folder, rank.number),
            )
            for rank in self._ranks
        ]
        first = first_failure(endings)
        if signals.stopped_by is not None and (first is None or first.since >= signals.stopped_at):
            self._err.say(f"shoal: stopped by {signals.stopped_by.name}.")
            return 128 + signals.stopped_by
        if first is None:
            return 0
        self._err.say(summarize(first, endings))
        if complaint := store.complaint():
            self._err.say(f"  The store had ended before: {complaint}")
        return first.exit_code

    async def _wait_for_nodes(self, signals: Signals, store: StoreProcess, *, failed: bool) -> None:
        """The store of several nodes must outlive the ranks of all, whose are not ours to see."""
        if self._config.nodes == 1 or signals.stop.is_set():
            return
        patience = self._config.grace + _TERM_SECONDS if failed else _OTHER_NODES_SECONDS
        await _first_of(store.leave(patience), signals.stop.wait(), timeout=patience + 5.0)

    async def _clean_up(self) -> None:
        """Ends what still runs, which is nothing unless an error got us here."""
        for rank in self._ranks:
            rank.send_group(signal.SIGKILL)
        await asyncio.gather(*(rank.sweep() for rank in self._ranks))
        if self._job is not None:
            await self._job.close()


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"--log-dir must be a folder to write to, but {str(path)!r} cannot be made: "
            f"{error.strerror}. Choose another."
        ) from error


async def _all_ended(codes: list[asyncio.Future[int]]) -> None:
    await asyncio.wait(codes)


async def _all_well(codes: list[asyncio.Future[int]]) -> None:
    """Returns when all have ended, or one has ended badly."""
    for done in asyncio.as_completed(codes):
        if await done != 0:
            return


async def _first_of(*waits: Coroutine[Any, Any, object], timeout: float | None = None) -> None:
    """Waits for the first of several things, and drops the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Signals:
    """Signals that reach the launcher go on to its ranks; two of them also mean the end."""

    def __init__(self, ranks: list[Rank]) -> None:
        """Forwards to `ranks`, a list that may still grow."""
        self._ranks = ranks
        self.stopped_by: signal.Signals | None = None
        self.stopped_at = 0.0
        self.stop = asyncio.Event()
        """Set by the first SIGINT or SIGTERM."""
        self.hurry = asyncio.Event()
        """Set by a second SIGINT: the grace period is skipped."""

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[None]:
        """Handles signals inside the block, and puts the handlers back that were there.

        A signal that the launcher was started to ignore (nohup) stays ignored. Outside the main
        thread Python delivers no signals, so there is nothing to forward.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {signum: signal.getsignal(signum) for signum in _FORWARDED}
        handled = [signum for signum in _FORWARDED if before[signum] not in (signal.SIG_IGN, None)]
        for signum in handled:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in handled:
                loop.remove_signal_handler(signum)
                signal.signal(signum, before[signum])

    def _on_signal(self, signum: signal.Signals) -> None:
        for rank in self._ranks:
            rank.send(signum)
        if signum == signal.SIGINT and self.stop.is_set():
            self.hurry.set()
        if signum in _STOPPING and self.stopped_by is None:
            self.stopped_by, self.stopped_at = signum, time.time()
            self.stop.set()

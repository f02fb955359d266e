"""Starts the ranks of one contender, lets them begin each step together, and ends them in time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import IO, Any

from gpu_rank import Turn

_SCRIPT = Path(__file__).with_name("gpu_rank.py")
_AHEAD_S = 0.002
# For ranks to end by themselves, after another one has failed or when all have measured; the
# latter may still have a trace to write.
_GRACE_S, _ENDING_S = 5.0, 90.0
_TAIL_LINES = 25


@dataclass
class Outcome:
    """What came of a turn.

    Attributes:
        results: What each rank measured; empty if not all ranks came so far.
        errors: What went wrong, with the end of what the rank wrote.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class RankProcess:
    """One rank, and a connection to it."""

    def __init__(self, turn: Turn, rank: int, environment: dict[str, str]) -> None:
        self.rank = rank
        self.result: dict[str, Any] = {}
        self.is_waiting = self.is_gone = False
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see `close`
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_SCRIPT), turn.as_json(), str(theirs.fileno())],
                env={**os.environ, **environment, "RANK": str(rank)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def receive(self) -> None:
        """Takes one message: none to wait for the others, or the result."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.is_gone = True
            return
        self.is_waiting, self.result = message is None, message or {}

    def go(self, moment: float) -> None:
        """Lets it begin then."""
        self.is_waiting = False
        with contextlib.suppress(BrokenPipeError):  # what has died is seen when it is waited for
            self.connection.send(moment)

    def end(self, deadline: float) -> str | None:
        """Waits until it ends, or kills it; returns what went wrong."""
        try:
            status = self._process.wait(max(0.0, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            self.kill()
            return f"rank {self.rank} did not end in time\n{self._tail()}"
        return f"rank {self.rank} ended with {status}\n{self._tail()}" if status else None

    def _tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-_TAIL_LINES:])

    def kill(self) -> None:
        """Also if it has ended already."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill()
        self.connection.close()
        self._log.close()


def take(turn: Turn, ranks: int, gpus: int, timeout: float) -> Outcome:
    """Runs the ranks of one contender; whatever happens, they have ended afterwards.

    Args:
        turn: What they do.
        ranks: How many.
        gpus: How many GPUs there are for them; 0 on a CPU.
        timeout: Seconds for all of it.
    """
    deadline = time.perf_counter() + timeout
    with _started(turn, ranks, gpus) as processes:
        have_finished = _supervise(processes, deadline)
        end = time.perf_counter() + (_ENDING_S if have_finished else _GRACE_S)
        errors = [error for each in processes if (error := each.end(end))]
        if not have_finished:
            return Outcome(errors=errors or ["a rank ended without a result"])
        return Outcome([each.result for each in processes], errors)


@contextlib.contextmanager
def _started(turn: Turn, ranks: int, gpus: int) -> Iterator[list[RankProcess]]:
    environment = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            local = {"LOCAL_RANK": str(rank % gpus if gpus else rank)}
            process = RankProcess(turn, rank, environment | local)
            stack.callback(process.close)
            processes.append(process)
        yield processes


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _supervise(processes: list[RankProcess], deadline: float) -> bool:
    """Lets the ranks begin together, again and again; True once all have sent their results."""
    by_connection: dict[Any, RankProcess] = {each.connection: each for each in processes}
    while not all(each.result for each in processes):
        if not (ready := wait(by_connection, deadline - time.perf_counter())):
            return False
        for connection in ready:
            process = by_connection[connection]
            process.receive()
            if process.is_gone:
                return False
            if process.result:  # its end is awaited later
                del by_connection[connection]
        if all(each.is_waiting for each in processes):
            moment = time.perf_counter() + _AHEAD_S
            for each in processes:
                each.go(moment)
    return True

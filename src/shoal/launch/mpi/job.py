"""Ranks started through `mpiexec`, and watched as if they were our own children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.mpi import mpiexec
from shoal.launch.script.config import LaunchConfig, own_variables
from shoal.launch.script.guard import spawn
from shoal.launch.script.output import RankOutput
from shoal.launch.script.rank import Rank, exit_of

_RANK_SCRIPT = Path(__file__).with_name("rank_helper.py")
_START_SECONDS = 60.0
_END_SECONDS = 5.0


class MpiJob:
    """One `mpiexec` and the links to its ranks.

    Each rank has a helper beside it (`rank_helper.py`) that dials in here, is given the rank's
    streams and variables, and reports two numbers: the rank's pid and, later, its return code.
    """

    def __init__(
        self,
        config: LaunchConfig,
        folder: Path,
        variables_of: Callable[[int], dict[str, str]] | None = None,
    ) -> None:
        """Finds `mpiexec`; `folder` is for the socket, and must be private.

        ``variables_of`` gives what tells a rank from the others, by default `own_variables`.
        """
        self._config = config
        self.variables_of = variables_of or partial(own_variables, config)
        self._prefix, self._variables = mpiexec.command(config.ranks)
        self._address = str(folder / "ranks.sock")
        self._writers: list[asyncio.StreamWriter] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._output: RankOutput | None = None

    @property
    def survives_losses(self) -> bool:
        """Whether MPI itself goes on when a rank is lost."""
        return "ulfm" in self._prefix

    @property
    def pid(self) -> int:
        """The pid of `mpiexec`, and of its group."""
        assert self._process is not None
        return self._process.pid

    async def start(
        self,
        env: Mapping[str, str],
        output: RankOutput,
        output_of: Callable[[int], RankOutput],
        on_rank: Callable[[Rank], None],
    ) -> None:
        """Starts all ranks; `output` is for the words of `mpiexec` itself."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind(listener, self._address)
            listener.listen(self._config.ranks)
            listener.setblocking(False)
            self._process = self._start_mpiexec(env, output)
            welcome = asyncio.create_task(self._welcome_all(listener, output_of, on_rank))
            gone = asyncio.create_task(exit_of(self._process))
            await asyncio.wait(
                [welcome, gone], timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in (welcome, gone):
                task.cancel()
            await asyncio.wait([welcome, gone])
            if welcome.cancelled():
                raise self._refusal()
            welcome.result()

    async def close(self) -> None:
        """Lets the helpers go, and with them `mpiexec`."""
        for writer in self._writers:
            writer.close()
        if self._process is not None:
            for signum in (None, signal.SIGTERM, signal.SIGKILL):
                if signum is not None:
                    self._process.send_signal(signum)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(exit_of(self._process), _END_SECONDS)
                    break
        if self._output is not None:
            self._output.close()

    def _start_mpiexec(self, env: Mapping[str, str], output: RankOutput) -> subprocess.Popen[bytes]:
        helper = [sys.executable, "-I", str(_RANK_SCRIPT), self._address]
        self._output = output
        process = spawn(
            [*self._prefix, *helper, *self._config.command()],
            stdin=subprocess.DEVNULL,
            stdout=output.fds[0],
            stderr=output.fds[1],
            env={**env, **self._variables},
        )
        output.started()
        return process

    async def _welcome_all(
        self,
        listener: socket.socket,
        output_of: Callable[[int], RankOutput],
        on_rank: Callable[[Rank], None],
    ) -> None:
        for _ in range(self._config.ranks):
            link, _ = await asyncio.get_running_loop().sock_accept(listener)
            reader, writer = await asyncio.open_unix_connection(sock=link)
            self._writers.append(writer)
            number = await _next_number(reader)
            output = output_of(number)
            variables = json.dumps(self.variables_of(number)).encode()
            socket.send_fds(link, [variables], output.fds)
            output.started()
            rank = Rank(number, await _next_number(reader), output)
            rank.follow(_code_from(reader, rank))
            on_rank(rank)

    def _refusal(self) -> LaunchError:
        assert self._output is not None
        assert self._process is not None
        code = self._process.poll()
        self._output.close()
        words = self._output.tail().decode(errors="replace").strip()
        return LaunchError(
            f"mpiexec must start {self._config.ranks} rank(s), but it "
            + (
                f"did not within {_START_SECONDS:.0f} s"
                if code is None
                else f"gave up (exit code {code})"
            )
            + (": see what it says above. " if words else " without a word. ")
            + f"Try it by hand: {' '.join(self._prefix)} hostname"
        )


def _bind(listener: socket.socket, address: str) -> None:
    try:
        listener.bind(address)
        Path(address).chmod(0o600)  # whatever the umask
    except OSError as error:
        raise LaunchError(
            f"A socket at {address} must be possible, but the system says: {error}. "
            "Set TMPDIR to a folder with a short path, such as /tmp."
        ) from error


async def _next_number(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise LaunchError(
            "A rank must report to the launcher, but it ended before. See the output above; "
            "often the script's interpreter or its libraries cannot be loaded under mpiexec."
        )
    return int(line)


async def _code_from(reader: asyncio.StreamReader, rank: Rank) -> int:
    """The code that the helper reports; if the helper itself is killed, so is its rank."""
    try:
        line = await reader.readline()
    except OSError:
        line = b""
    if not line:
        rank.send_group(signal.SIGKILL)
    return int(line) if line else -signal.SIGKILL

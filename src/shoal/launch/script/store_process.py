"""The launcher's handle of the store: a port that is bound before any rank starts, a process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.script.config import LaunchConfig
from shoal.launch.script.guard import spawn
from shoal.launch.script.rank import exit_of

_HOST_SCRIPT = Path(__file__).with_name("store_host.py")


def listen(config: LaunchConfig) -> socket.socket:
    """Binds the port on which node 0 holds the store: loopback, unless nodes must reach it.

    The socket listens at once, so ranks that are quicker than the store wait in its queue.
    """
    try:
        if config.nodes == 1:
            return socket.create_server((config.host, config.port), backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", config.port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        return socket.create_server(("", config.port), backlog=1024)
    except OSError as error:
        raise _refusal(config, error) from None


def _refusal(config: LaunchConfig, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"Port {config.port} must be free for the ranks to meet on, but another process "
            f"listens there. Choose another port with --master HOST:PORT, leave --master out on a "
            f"single node, or find the process with: ss -ltnp 'sport = :{config.port}'"
        )
    return LaunchError(
        f"Port {config.port} must be usable for the ranks to meet on, but the system says: "
        f"{error.strerror}. Choose another port with --master HOST:PORT."
    )


class StoreProcess:
    """The process that holds the store of node 0, or another node's connection to it.

    One node's store ends with its ranks. A store of several nodes stays until the ranks of all
    have ended.
    """

    def __init__(self, config: LaunchConfig, listener: socket.socket | None, log: Path) -> None:
        """Starts the process; `listener` is handed over to it, and None on nodes but the first."""
        self._log = log
        arguments = ["join", config.host, str(config.port)]
        if listener is not None:
            fd, port = listener.fileno(), listener.getsockname()[1]
            arguments = ["host", str(fd), str(port), str(config.nodes)]
        with log.open("wb") as stderr:
            self._process = spawn(
                # -P: the folder of the script must not hide modules of the same names from torch.
                [sys.executable, "-P", str(_HOST_SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=() if listener is None else (listener.fileno(),),
            )

    def complaint(self) -> str | None:
        """Why the process ended by itself; None while it runs."""
        if self._process.poll() is None:
            return None
        words = self._log.read_text(errors="replace").strip().splitlines()
        return words[-1] if words else f"exit code {self._process.returncode}"

    async def leave(self, patience: float) -> None:
        """Says that this node's ranks have ended; returns when those of all have, or it is late."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{patience}\n".encode())
            self._process.stdin.flush()
        await exit_of(self._process)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

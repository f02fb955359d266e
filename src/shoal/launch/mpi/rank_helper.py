"""Stands between `mpiexec` and a rank; run by its path, with nothing but the standard library.

`mpiexec` mixes the output of ranks inside lines, adds up their exit codes, and ends the others in
its own way when one ends badly. So what it starts is this: it gets the rank's streams and variables
from the launcher over a socket, starts the rank, reports its pid and its return code, and stays
until the launcher lets go of the socket. To `mpiexec`, all ranks end together, and well.

    python rank_helper.py SOCKET COMMAND...
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from types import FrameType

_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_MESSAGE_BYTES = 64 * 1024


def main(address: str, *command: str) -> None:
    """Runs one rank to its end."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(address)
    _tell(link, next(int(os.environ[name]) for name in _RANK_NAMES if name in os.environ))
    _expect_signals()
    child = _start(link, command)
    signal.signal(signal.SIGTERM, lambda *_: _end(child, signal.SIGTERM))
    _tell(link, child.pid)
    leash = threading.Thread(target=_hold, args=(link, child))
    leash.start()
    _tell(link, child.wait())
    leash.join()


def _start(link: socket.socket, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    message, fds, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 2)
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, **json.loads(message)},
            stdin=subprocess.DEVNULL,
            stdout=fds[0],
            stderr=fds[1],
            close_fds=False,  # MPICH hands its ranks an open descriptor
            start_new_session=True,
        )
    finally:
        for fd in fds:
            os.close(fd)


def _hold(link: socket.socket, child: subprocess.Popen[bytes]) -> None:
    """Ends the rank, if it still runs, once the launcher has closed the socket."""
    if not link.recv(1):
        _end(child, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes], signum: int) -> None:
    if child.returncode is None:
        os.killpg(child.pid, signum)


def _expect_signals() -> None:
    """The launcher signals ranks itself; what `mpiexec` sends here (MPICH: SIGUSR1) is noise.

    A handler, not SIG_IGN, which the rank would inherit.
    """

    def ignore(signum: int, frame: FrameType | None) -> None:
        pass

    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, ignore)


def _tell(link: socket.socket, number: int) -> None:
    try:
        link.sendall(f"{number}\n".encode())
    except OSError:
        sys.exit(1)  # the launcher is gone; the thread that holds the leash ends the rank


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # not through Python's own end, which would let in the signals ignored so far

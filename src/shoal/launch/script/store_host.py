"""The process that holds the store where ranks meet; run by its path, and alone in loading torch.

A process of its own, because importing torch takes seconds: here that goes on while the ranks do
the same, the launcher stays small and quick to its signals, and the store can be ended at any
moment. It lives on a leash: when its standard input ends, so does it. A number of seconds on the
leash means that this node's ranks have ended; the store then stays that long for other nodes'.

    python store_host.py host FD PORT NODES
    python store_host.py join ADDR PORT
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_ENDED = "shoal/launch/nodes-ended"


def main(role: str, *rest: str) -> None:
    """Holds the store, or a connection to it, until the launcher closes standard input."""
    store = _host(int(rest[0]), int(rest[1])) if role == "host" else _join(rest[0], int(rest[1]))
    seconds = sys.stdin.readline()
    if not seconds:
        return
    # `add` counts the nodes; the key that bears the count is what `wait` can wait for.
    store.set(f"{_ENDED}/{store.add(_ENDED, 1)}", "")
    if role == "host":
        store.wait([f"{_ENDED}/{int(rest[2])}"], timedelta(seconds=float(seconds)))


def _host(fd: int, port: int) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _join(addr: str, port: int) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(addr, port, is_master=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # torch takes half a second to take itself apart

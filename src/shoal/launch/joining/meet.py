"""Where the ranks of this environment meet, and who holds the server there.

- ``SHOAL_MEETING`` is set: whoever started the ranks (`shoal.run`, `shoal launch`) holds it.
- One host: rank 0, at a name that follows from the user, the run and its master.
- Several hosts: rank 0, at the master's port. Where that is taken (by torchrun's agent, or by the
  store of a process group that the script made), at a port of its own, which it publishes there
  with a signature.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from shoal.comm.bootstrap.bootstrap import Bootstrap, MeetingBootstrap, find_server
from shoal.comm.control.addresses import own_address
from shoal.errors import LaunchError
from shoal.launch.joining.environment import RankInfo
from shoal.meeting.address import (
    MEETING_VARIABLE,
    listen_everywhere,
    listen_unix,
    tcp_address,
    unix_address,
)
from shoal.meeting.client import report_failure
from shoal.meeting.handshake import TOKEN_VARIABLE
from shoal.meeting.server import MeetingServer, token_key
from shoal.system.deadline import Deadline, joining_text, pauses
from shoal.torch_internals.process_groups import default_store

if TYPE_CHECKING:
    from torch.distributed import Store

_REPORT_S = 5.0
_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
# Worlds of one process after another: each meets anew.
_generation = 0


def meet(info: RankInfo, timeout: float) -> Bootstrap:
    """The bootstrap of the next world of this process."""
    global _generation
    _generation += 1
    position = (info.rank, info.size)
    with contextlib.ExitStack() as stack:
        server = _host(info, _generation, timeout)
        if server is not None:
            stack.callback(server.close)
        with _the_only_one(info, _generation):
            address = _find(info, _generation, timeout) if server is None else server.address
            client = find_server(address, *position, timeout, _generation)
        stack.pop_all()
    return MeetingBootstrap(client, position, timeout, _generation, server)


def report(info: RankInfo, reason: str) -> None:
    """Tells the others why this rank will not join."""
    if info.rank == 0 and MEETING_VARIABLE not in os.environ:
        return  # nobody holds a server but us
    address = _find(info, _generation + 1, _REPORT_S)
    client = find_server(address, info.rank, info.size, _REPORT_S, 0)
    with contextlib.closing(client):
        report_failure(client, info.rank, reason)


@contextlib.contextmanager
def _the_only_one(info: RankInfo, generation: int) -> Iterator[None]:
    """Refuses a second process that looks for the others as the same rank, on this host.

    The server sees two of them if both reach it. The one that is a moment late may not: the first
    has joined by then, and the server of a world is gone once all are in it.
    """
    if info.rank == 0 or MEETING_VARIABLE in os.environ or sys.platform != "linux":
        yield  # rank 0 holds the server, or the launcher does
        return
    place = (info.master_addr, info.master_port)
    text = (
        f"rank {info.rank} was started twice: another process of this host is rank {info.rank} at "
        f"MASTER_ADDR={place[0]}, MASTER_PORT={place[1]}. Give each process a RANK of its own, and "
        "each run a MASTER_PORT of its own."
    )
    name = unix_address(*_run(), *place, generation, "rank", info.rank)
    with listen_unix(name, text):
        yield


def _host(info: RankInfo, generation: int, timeout: float) -> MeetingServer | None:
    """The server, where this rank has to hold it."""
    if MEETING_VARIABLE in os.environ or info.rank != 0:
        return None
    if _is_one_host(info) and info.master_addr is not None:
        return MeetingServer.on_one_host(_local_address(info, generation), generation)
    store = _open_store(info, timeout)
    if _is_one_host(info):
        server = MeetingServer.on_one_host(None, generation)
    elif store is None:
        assert info.master_addr is not None
        assert info.master_port is not None
        server = _between_hosts(info.master_addr, info.master_port, generation)
    else:
        server = _between_hosts(own_address(), 0, generation)
    if store is not None:
        _publish(store, server.address, generation)
    return server


def _between_hosts(host: str, port: int, generation: int) -> MeetingServer:
    try:
        listener = listen_everywhere(port)
    except OSError as error:
        raise LaunchError(
            f"rank 0 must listen on port {port} for the ranks to meet, but the system says: "
            f"{error.strerror}. Set MASTER_PORT to a port that is free on rank 0's host."
        ) from error
    token = os.environ.get(TOKEN_VARIABLE, "")
    return MeetingServer.between_hosts(listener, host, token, generation)


def _find(info: RankInfo, generation: int, timeout: float) -> str:
    """The address of the server that another process holds."""
    if MEETING_VARIABLE in os.environ:
        return os.environ[MEETING_VARIABLE]
    if _is_one_host(info) and info.master_addr is not None:
        return _local_address(info, generation)
    store = _open_store(info, timeout)
    if store is not None:
        return _published(store, info, generation, timeout)
    assert info.master_addr is not None
    assert info.master_port is not None
    return tcp_address(info.master_addr, info.master_port)


def _is_one_host(info: RankInfo) -> bool:
    return info.local_size == info.size


def _local_address(info: RankInfo, generation: int) -> str:
    return unix_address(*_run(), info.master_addr, info.master_port, generation)


def _run() -> tuple[str, str]:
    """What tells this run from others, and its restarts from each other."""
    run = os.environ.get("SHOAL_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "run")
    return run, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


# An open store, where anybody may read and write ----------------------------------------------


def _open_store(info: RankInfo, timeout: float) -> Store | None:
    """A store of torch's that all ranks reach already; None if there is none."""
    import torch.distributed as dist

    if dist.is_initialized():
        return default_store()
    if info.master_addr is None or info.master_port is None:
        raise LaunchError(
            f"rank {info.rank} of {info.size} ({info.source}) does not know where to meet the "
            "others: set MASTER_ADDR and MASTER_PORT, or start the ranks with shoal launch."
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return None
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(info.master_addr, info.master_port, is_master=False, timeout=wait)


def _publish(store: Store, address: str, generation: int) -> None:
    key = _key(generation)
    store.set(key, json.dumps([address, _signature(key, address)]))


def _published(store: Store, info: RankInfo, generation: int, timeout: float) -> str:
    key, deadline = _key(generation), Deadline(timeout)
    for pause in pauses(_POLL_S, _LONGEST_POLL_S):
        if store.check([key]):
            break
        deadline.enforce(joining_text, info.rank, info.size, lambda: [0], "Has it been started?")
        time.sleep(pause)
    try:
        address, signature = map(str, json.loads(store.get(key)))
    except (ValueError, TypeError):  # whoever wrote that is no rank
        address = signature = ""
    if not hmac.compare_digest(signature.encode(), _signature(key, address).encode()):
        raise LaunchError(
            f"where the ranks meet is in torch's store, but not signed with this rank's "
            f"{TOKEN_VARIABLE}: it must have the same value, or none, on every rank; or a stranger "
            "has written to the store."
        )
    return address


def _key(generation: int) -> str:
    return "/".join(("shoal", *_run(), str(generation), "meeting"))


def _signature(key: str, value: str) -> str:
    """Covers the run, the world and the key. On one host the kernel vouches for who is there."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return hmac.digest(token_key(token), f"{key}\0{value}".encode(), "sha256").hex()

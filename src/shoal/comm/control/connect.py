"""From a bootstrap to a control plane: ranks tell each other on which host they are."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shoal.comm.control.page.control import PageControl, is_supported
from shoal.comm.control.page.page import Page
from shoal.comm.control.sockets.sockets import SocketControl
from shoal.errors import ShoalError
from shoal.torch_support.process_memory import can_read, probe_address

if TYPE_CHECKING:
    from shoal.comm.bootstrap.bootstrap import Bootstrap
    from shoal.comm.control.plane import Control

_MAPPED, _READS = b"mapped the page", b"mapped the page, can read the others"


@dataclass(frozen=True)
class RankIdentity:
    """Which process a rank is, and on which host."""

    host: str
    pid: int
    page_fd: int
    probe: int


def host_id() -> str:
    """Equal for two processes that can share memory and see each other's processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
            return "/".join([boot_id.read().strip(), *spaces, str(os.getuid())])
    except OSError:  # no Linux: every process is a host of its own
        return f"{os.uname().nodename}/{os.getpid()}"


def connect(bootstrap: Bootstrap, *, reads_memory: bool = False) -> Control:
    """The control plane of a new world: a page on one host, sockets across several.

    ``reads_memory`` is for transports whose ranks may read each other's memory.
    """
    control = _connect(bootstrap, reads_memory=reads_memory)
    control.is_elastic = bootstrap.is_elastic
    return control


def _connect(bootstrap: Bootstrap, *, reads_memory: bool) -> Control:
    is_first = bootstrap.rank == 0 and is_supported()
    page_fd = Page.create(bootstrap.size) if is_first else -1  # in case all are on its host
    probe = probe_address() if reads_memory else 0
    identity = RankIdentity(host_id(), os.getpid(), page_fd, probe)
    encoded = json.dumps(asdict(identity)).encode()
    identities = [RankIdentity(**json.loads(data)) for data in bootstrap.all_gather(encoded)]
    if len({identity.host for identity in identities}) == 1 and identities[0].page_fd >= 0:
        return _connect_page(bootstrap, identities)
    if page_fd >= 0:
        os.close(page_fd)
    return SocketControl.connect(bootstrap)


def check_owner(fd: int, whose: str) -> None:
    """Refuses memory that another user made, and could write what ranks then act on."""
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        raise ShoalError(
            f"{whose} belongs to uid {owner}, and this rank runs as uid {os.geteuid()}: a stranger "
            "is among the ranks, or they run as different users."
        )


def _connect_page(bootstrap: Bootstrap, identities: Sequence[RankIdentity]) -> PageControl:
    first = identities[0]
    try:
        fd = os.open(f"/proc/{first.pid}/fd/{first.page_fd}", os.O_RDWR)
    except OSError as error:
        raise ShoalError(
            f"rank {bootstrap.rank} cannot open the control page of rank 0 (pid {first.pid}): "
            f"{error}. The ranks of one host must run as the same user."
        ) from error
    try:
        check_owner(fd, f"the control page of rank 0 (pid {first.pid})")
        page = Page(fd, bootstrap.size)
    finally:
        os.close(fd)
    reads = all(each.probe and can_read(each.pid, each.probe) for each in identities)
    said = bootstrap.all_gather(_READS if reads else _MAPPED)
    if bootstrap.rank == 0:  # everybody has mapped the file: it can be let go of
        os.close(first.page_fd)
    all_read = all(word == _READS for word in said)
    pids = [identity.pid for identity in identities]
    control = PageControl(page, bootstrap.rank, pids, ranks_read_directly=all_read)
    control.secret = bootstrap.secret
    return control

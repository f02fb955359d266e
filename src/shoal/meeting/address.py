"""Where ranks meet, as text: `unix:@NAME` or `unix:PATH` on a host, `tcp:HOST:PORT` between hosts.

On one host the kernel says which user is at the other end of a socket, and both sides look.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import sys
import tempfile

from shoal.errors import LaunchError

MEETING_VARIABLE = "SHOAL_MEETING"
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid
_XUCRED = struct.Struct("=2I")  # version, uid
_BACKLOG = 1024


def unix_address(*identity: object) -> str:
    """An address that all processes of this user arrive at who know the same few things."""
    text = "\0".join(str(part) for part in (os.geteuid(), *identity))
    name = f"shoal-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return f"unix:@{name}" if sys.platform == "linux" else f"unix:{_private_folder()}/{name}"


def tcp_address(host: str, port: int) -> str:
    """The address of a port on a host."""
    return f"tcp:{host}:{port}"


def elastic_address(host: str, port: int) -> str:
    """Where the elastic run meets that its launcher calls HOST:PORT.

    By a name of the loopback that is a run of the same user on this host, and no port of anything.
    """
    return unix_address("elastic", port) if is_this_host(host) else tcp_address(host, port)


def is_this_host(host: str) -> bool:
    """Whether a name or an address can mean nothing but the host itself."""
    return host in ("localhost", "::1") or host.startswith("127.")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of a TCP address; None for another."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    return (host, int(port)) if kind == "tcp" else None


def listen_unix(address: str, held: str = "") -> socket.socket:
    """A listener at a unix address; an error names the user who holds it.

    ``held`` is what to say if it is a process of the same user.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(address))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_held_text(address, error, held)) from None
    return above_stdio(listener)


def connect_to(address: str, timeout: float) -> socket.socket:
    """A connection; on one host only to a process of the same user."""
    place = host_and_port(address)
    if place is not None:
        return above_stdio(socket.create_connection(place, timeout))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(_name(address))
        if peer_uid(sock) != os.geteuid():
            raise LaunchError(_held_text(address, None))
    except BaseException:
        sock.close()
        raise
    return above_stdio(sock)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a unix socket, as the kernel knows it."""
    if hasattr(socket, "SO_PEERCRED"):
        option = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(option)[1])
    option = sock.getsockopt(0, 1, 76)  # SOL_LOCAL, LOCAL_PEERCRED of macOS
    return int(_XUCRED.unpack(option[: _XUCRED.size])[1])


def above_stdio(sock: socket.socket) -> socket.socket:
    """The socket under a number that nobody takes for standard input, output or error.

    Where a process was started with these closed, its first sockets get their numbers.
    """
    if sock.fileno() > 2:
        return sock
    import fcntl

    fd = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    timeout = sock.gettimeout()
    sock.close()
    moved = socket.socket(fileno=fd)
    moved.settimeout(timeout)
    return moved


def remove(address: str) -> None:
    """Removes the file of a unix address that has one."""
    if address.startswith("unix:/"):
        with contextlib.suppress(OSError):
            os.unlink(_name(address))


def _name(address: str) -> str:
    name = address.removeprefix("unix:")
    return "\0" + name[1:] if name.startswith("@") else name


def _held_text(address: str, error: OSError | None, held: str = "") -> str:
    uid: int | None = None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(_name(address))
        uid = peer_uid(probe)
    if uid is not None and uid != os.geteuid():
        return (
            f"the ranks meet at {address}, but a process of another user (uid {uid}) holds that "
            f"name, and yours is uid {os.geteuid()}. Start the run under another SHOAL_RUN_ID or "
            "MASTER_PORT, and ask who runs that process."
        )
    if uid is not None and held:
        return held
    return (
        f"the ranks cannot meet at {address}: {error}. Was rank 0 started twice, or does another "
        "run use the same MASTER_PORT?"
    )


def _private_folder() -> str:
    """A folder that no other user can enter, for systems without abstract names."""
    folder = os.path.join(tempfile.gettempdir(), f"shoal-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise LaunchError(
            f"{folder} must belong to uid {os.geteuid()} and be closed to others: the ranks meet "
            "there. Remove it, or set TMPDIR to a folder of your own."
        )
    return folder


def free_port() -> tuple[str, int]:
    """A port of this host's loopback that nobody listens on now, for a script's own use."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.create_server((host, 0), family=family) as probe:
            return host, int(probe.getsockname()[1])
    return "127.0.0.1", 29500


def listen_everywhere(port: int) -> socket.socket:
    """A listener on all addresses of this host."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)

"""The launcher's part in the meeting of its ranks: it holds the server, or tells who does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

from shoal.errors import LaunchError, ShoalError
from shoal.launch.script.config import LaunchConfig
from shoal.meeting.address import elastic_address, free_port, listen_everywhere, tcp_address
from shoal.meeting.client import NotThereYet, report_node_ended
from shoal.meeting.handshake import TOKEN_VARIABLE
from shoal.meeting.server import MeetingServer

_POLL_S = 0.05
_LAST_PORT = 65_535
_TRIES = 5
_NO_TOKEN = (
    f"Ranks of other hosts prove by {TOKEN_VARIABLE} that they may join, but it is not set. Set it "
    "to the same secret here and where they are started."
)


class MeetingPlace:
    """Where the ranks of all nodes meet, from before the first one starts.

    On one node that is a socket of this host which only the same user can call. Node 0 of several
    holds a port; its server stays until the ranks of all nodes have ended. So does the launcher of
    an elastic run that ranks of other hosts may join.
    """

    def __init__(self, config: LaunchConfig) -> None:
        """Begins to listen, if that is for this node to do."""
        self._config = config
        self._server: MeetingServer | None = None
        self.address = tcp_address(config.host, config.port)
        self.master_host, self.master_port = _master(config)
        if not config.is_between_hosts:
            is_elastic = config.elastic is not None
            self._server = self._hold_elastic() if is_elastic else MeetingServer.on_one_host()
            self.address = self._server.address
        elif config.node_rank == 0:
            token = os.environ.get(TOKEN_VARIABLE, "")
            if config.elastic is not None and not token:
                raise LaunchError(_NO_TOKEN)
            self._server = MeetingServer.between_hosts(_listen(config), config.host, token)

    def _hold_elastic(self) -> MeetingServer:
        """At the name that belongs to the port, which nobody listens on: another may choose it."""
        for is_last in (*[False] * _TRIES, True):
            try:
                address = elastic_address(self.master_host, self.master_port)
                return MeetingServer.on_one_host(address)
            except LaunchError:
                if self._config.port:
                    raise LaunchError(_taken(self._config.port)) from None
                if is_last:
                    raise
                self.master_host, self.master_port = free_port()
        raise AssertionError("the last failure is raised")

    @property
    def server(self) -> MeetingServer:
        """Where this node holds one."""
        assert self._server is not None
        return self._server

    def __enter__(self) -> MeetingPlace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()

    def report_failure(self, rank: int, code: int) -> None:
        """A rank has ended: those that wait for it to join are told."""
        if self._server is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._server.report_failure(rank, f"its process {how} before it joined")

    async def leave(self) -> None:
        """Says that this node's ranks have ended; on node 0 returns when those of all have."""
        if self._server is None:
            with contextlib.suppress(NotThereYet, ShoalError):
                await asyncio.to_thread(report_node_ended, self.address, self._config.node_rank)
            return
        self._server.end_node(self._config.node_rank)
        while self._server.num_ended() < self._config.nodes:
            await asyncio.sleep(_POLL_S)


def _master(config: LaunchConfig) -> tuple[str, int]:
    """Where torch's own store may listen, for scripts that make a process group by themselves."""
    if config.is_between_hosts:
        return config.host, config.port + 1 if config.port < _LAST_PORT else config.port - 1
    if config.port:
        with _listen(config):  # is it free?
            return config.host, config.port
    return free_port()


def _listen(config: LaunchConfig) -> socket.socket:
    try:
        if config.is_between_hosts:
            return listen_everywhere(config.port)
        return socket.create_server((config.host, config.port))
    except OSError as error:
        raise _refusal(config, error) from None


def _taken(port: int) -> str:
    return (
        f"Another elastic run of this host has port {port} in its --master, or another user holds "
        "its name. Choose another port with --master HOST:PORT, or leave --master out."
    )


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

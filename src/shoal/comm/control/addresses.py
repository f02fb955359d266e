"""By which of its addresses a host is reached by the others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.comm.bootstrap.bootstrap import Bootstrap

ADDRESS_VARIABLE = "SHOAL_HOST_ADDR"
LOOPBACK = "127.0.0.1"
_LOOPBACKS = ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1"))
_DISCARD_PORT = 9
_TRIAL_S = 1.0
# An address of no host: the way there is the default route.
_UNREACHABLE = "192.0.2.1"


def own_address(bootstrap: Bootstrap | None = None) -> str:
    """This host's address towards the one where the ranks meet; the loopback if that is here."""
    named = os.environ.get(ADDRESS_VARIABLE)
    if named:
        return _resolved(named)
    found = [address for host in _meeting_hosts(bootstrap) if (address := address_towards(host))]
    if not found:
        found = [address for address in _guesses() if address]
    public = [address for address in found if not is_loopback(address)]
    return (public or found or [LOOPBACK])[0]


def settled_address(own: str, everybody: Sequence[str]) -> str:
    """A host that found only its loopback, among others that did not, uses its way to those."""
    others = [address for address in everybody if not is_loopback(address)]
    if not others or not is_loopback(own) or os.environ.get(ADDRESS_VARIABLE):
        return own
    return address_towards(others[0]) or own


def address_towards(host: str) -> str | None:
    """The address from which this host would send to another. Nothing is sent."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def usable_loopback() -> str | None:
    """The address by which processes of this host reach each other over TCP; None if none does.

    Tried with a connection: an interface that is down may have an address, and a way to it.
    """
    for family, address in _LOOPBACKS:
        with contextlib.suppress(OSError), socket.create_server((address, 0), family=family) as own:
            socket.create_connection(own.getsockname()[:2], _TRIAL_S).close()
            return address
    return None


def is_loopback(address: str) -> bool:
    """Whether only this host reaches the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _meeting_hosts(bootstrap: Bootstrap | None) -> Iterator[str]:
    """Hosts that all ranks reach."""
    for host in (bootstrap and bootstrap.host, os.environ.get("MASTER_ADDR")):
        if host:
            yield host


def _guesses() -> Iterator[str | None]:
    with contextlib.suppress(OSError):
        yield socket.getaddrinfo(socket.gethostname(), None)[0][4][0]  # type: ignore[misc]
    yield address_towards(_UNREACHABLE)


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise ShoalError(
            f"{ADDRESS_VARIABLE}={host!r} is no address of this host: {error}. Set it to the "
            "address, or the name, by which the other hosts reach this one."
        ) from error

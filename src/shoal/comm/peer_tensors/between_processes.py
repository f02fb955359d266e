"""Lent tensors where ranks are processes: this rank's thread serves, and clients ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.control.addresses import own_address, settled_address
from shoal.comm.peer_tensors.client import TensorClient, Whereabouts
from shoal.comm.peer_tensors.lending import LendingSource, PeerTensors, not_held
from shoal.comm.peer_tensors.server import TensorServer
from shoal.comm.world_state import closed_error
from shoal.errors import PeerError, ShoalError
from shoal.system.deadline import Deadline, fetch_text

if TYPE_CHECKING:
    from shoal.comm.backend import Backend
    from shoal.comm.control.plane import Control
    from shoal.comm.world_state import WorldState


class ProcessPeerTensors(PeerTensors):
    """One lending of one group, as one of its ranks sees it."""

    takes_time = True

    def __init__(
        self, backend: Backend, state: WorldState, control: Control, source: LendingSource
    ) -> None:
        """All ranks of the group ``backend`` call it."""
        self._backend, self._state, self._control = backend, state, control
        self._number, whereabouts = _meet(backend, state, control, source)
        self._clients = [
            TensorClient(control.rank, holder, each, state.secret)
            for holder, each in zip(backend.ranks, whereabouts, strict=True)
        ]
        self._is_closed = False
        state.lendings.append(self)

    def read(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """Asks the rank's thread."""
        return self._fetch(rank, key, "read", deadline)

    def take(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """Asks the rank's thread."""
        return self._fetch(rank, key, "take", deadline)

    def give(self, rank: int, key: str, tensor: Tensor, deadline: Deadline) -> None:
        """Asks the rank's thread for room, and fills it."""
        begin, holder = time.perf_counter(), self._backend.ranks[rank]
        request = {"kind": "give", "key": key, "device": tensor.device.type}
        header, _ = self._ask(rank, request, f"room for {key!r}", deadline, tensor)
        if "kept" not in header:
            why = header.get("error", "it has closed what kept tensors for others")
            raise ShoalError(f"rank {holder} cannot keep {key!r} for another rank: {why}")
        seconds = time.perf_counter() - begin
        self._state.statistics.count("give", tensor.nbytes, seconds, seconds)

    def drop(self, rank: int, keys: Sequence[str], deadline: Deadline) -> None:
        """Asks the rank's thread."""
        self._ask(rank, {"kind": "drop", "keys": list(keys)}, "what was given to it", deadline)

    def _fetch(self, rank: int, key: str, kind: str, deadline: Deadline) -> Tensor:
        what, begin = f"{key!r}", time.perf_counter()
        header, values = self._ask(rank, {"kind": kind, "key": key}, what, deadline)
        holder = self._backend.ranks[rank]
        if "error" in header:
            raise ShoalError(f"rank {holder} cannot lend {what}: {header['error']}")
        if values is None:
            raise not_held(holder, key, header.get("listing"))
        if not header["unchanged"]:
            raise ShoalError(
                f"rank {holder} changed {what} in place while rank {self._control.rank} "
                "read it: leave a tensor as it is while others may fetch it, or register a clone"
            )
        seconds = time.perf_counter() - begin
        self._state.statistics.count("fetch", values.nbytes, seconds, seconds)
        return self._on_device(values, str(header["device"]))

    def listing(self, rank: int, deadline: Deadline) -> list[list[Any]]:
        """Asks the rank's thread."""
        header, _ = self._ask(rank, {"kind": "list"}, "what it holds", deadline)
        if "listing" not in header:
            raise not_held(self._backend.ranks[rank], "anything", None)
        return list(header["listing"])

    def close(self) -> None:
        """The thread goes on for other lendings."""
        self._is_closed = True
        if self._state.tensor_server is not None:
            self._state.tensor_server.sources.pop(self._number, None)
        for client in self._clients:
            client.close()
        if self in self._state.lendings:
            self._state.lendings.remove(self)

    def _ask(
        self,
        rank: int,
        request: dict[str, Any],
        what: str,
        deadline: Deadline,
        given: Tensor | None = None,
    ) -> tuple[dict[str, Any], Tensor | None]:
        holder, control = self._backend.ranks[rank], self._control

        def watch() -> None:
            if self._state.is_closed or self._is_closed:
                raise closed_error(self._state, control.rank)
            failure = control.failure()
            reason = failure.reason if failure and failure.rank == holder else None
            if reason is None:
                reason = control.absence(holder)
            if reason is not None:
                raise PeerError(holder, reason, f"a fetch of {what} from it")
            deadline.enforce(fetch_text, control.rank, what, holder, control.whereabouts)

        watch()
        return self._clients[rank].ask({"lending": self._number, **request}, watch, given)

    def _on_device(self, values: Tensor, kind: str) -> Tensor:
        """Where the holder has it: on the same kind of device here."""
        if kind == "cpu":
            return values
        own = self._backend.device
        return values.to(own if own.type == kind else torch.device(kind))


def _meet(
    backend: Backend, state: WorldState, control: Control, source: LendingSource
) -> tuple[int, list[Whereabouts]]:
    """The number of the lending, and where each rank serves.

    Two exchanges: after the second one, every rank serves what it lends.
    """
    host = None if control.is_one_host else own_address()
    said = backend.all_gather_object([state.next_lending, host])
    number = max(next_lending for next_lending, _ in said)
    state.next_lending = number + 1
    if state.tensor_server is None:
        if host is not None:
            host = settled_address(host, [each for _, each in said])
        state.tensor_server = TensorServer(control.rank, state.secret, host)
    server = state.tensor_server
    server.sources[number] = source
    found = backend.all_gather_object([server.address, server.token])
    return number, [Whereabouts(*each) for each in found]

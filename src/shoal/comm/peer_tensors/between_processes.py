"""Lent tensors where ranks are processes: this rank's thread serves, and clients ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.control.addresses import own_address, settled_address
from shoal.comm.peer_tensors.client import TensorClient, Whereabouts
from shoal.comm.peer_tensors.lending import (
    Answer,
    CalledSource,
    LendingSource,
    PeerTensors,
    not_held,
)
from shoal.comm.peer_tensors.server import TensorServer
from shoal.comm.world_state import closed_error
from shoal.errors import ShoalError
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
        self._source = source
        self._number, whereabouts = _meet(backend, state, control, source)
        self._clients = [
            TensorClient(control.rank, holder, each, state.secret)
            for holder, each in zip(backend.ranks, whereabouts, strict=True)
        ]
        self._is_closed = False
        state.lendings.append(self)

    def read(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """Asks the rank's thread."""
        what, begin = f"{key!r}", time.perf_counter()
        header, values = self._ask(rank, {"kind": "read", "key": key}, what, deadline)
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

    def call(
        self, rank: int, request: dict[str, Any], values: Tensor | None, deadline: Deadline
    ) -> Answer:
        """Asks the rank's thread; this rank's own source is called."""
        if rank == self._backend.rank:
            assert isinstance(self._source, CalledSource)
            return self._source.handle(request, values)
        kind, begin = str(request["kind"]), time.perf_counter()
        what = f"the answer to a call of {kind!r}"
        asked = {"kind": "call", "request": request}
        header, answered = self._ask(rank, asked, what, deadline, values)
        holder = self._backend.ranks[rank]
        if "error" in header:
            raise ShoalError(f"rank {holder} could not handle {kind!r}: {header['error']}")
        if "answer" not in header:
            raise not_held(holder, "what answers calls", None)
        moved = [each.nbytes for each in (values, answered) if each is not None]
        seconds = time.perf_counter() - begin
        self._state.statistics.count(kind, sum(moved), seconds, seconds)
        return Answer(header["answer"], answered)

    def absence(self, rank: int) -> str | None:
        """What the control plane knows."""
        holder = self._backend.ranks[rank]
        failure = self._control.failure()
        if failure is not None and failure.rank == holder:
            return failure.reason
        return self._control.absence(holder)

    def hand_over(self) -> bool:
        """Processes run by themselves."""
        return True

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
        values: Tensor | None = None,
    ) -> tuple[dict[str, Any], Tensor | None]:
        holder, control = self._backend.ranks[rank], self._control

        def watch() -> None:
            if self._state.is_closed or self._is_closed:
                raise closed_error(self._state, control.rank)
            if (reason := self.absence(rank)) is not None:
                raise control.lost(holder, reason, f"a fetch of {what} from it")
            deadline.enforce(fetch_text, control.rank, what, holder, control.whereabouts)

        watch()
        answer = self._clients[rank].ask({"lending": self._number, **request}, watch, values)
        if "closed" in answer[0]:
            watch()  # a rank that leaves says so before it closes what it lends
        return answer

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

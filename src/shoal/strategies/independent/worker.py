"""What a worker does to servers: pulls, pushes, and the wait for the slowest rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm import Backend
from shoal.comm.control.plane import absence_text
from shoal.comm.peer_tensors.lending import Answer
from shoal.errors import DeadlockError, NotHeldError, PeerError, ShoalError
from shoal.strategies.independent.shard import Shard, pack, unpack
from shoal.strategies.independent.versions import Admission
from shoal.system.deadline import Deadline, staleness_text

_POLL_S = 0.002
_STAY = (
    ". Ranks need each other until all of them have trained: end the training with a call that all "
    "ranks make, such as model.state_dict()"
)


class Update(NamedTuple):
    """A step of an optimizer that servers make: the number is one of the worker's."""

    optimizer: int
    number: int
    factor: float
    gradients: Mapping[str, Tensor]
    options: Sequence[Mapping[str, Any]]


class Unmade(NamedTuple):
    """Of an update what servers have perhaps not made, by server."""

    update: Update
    names: Mapping[int, Sequence[str]]


class Worker:
    """One rank's calls to the servers; see [Note: servers and workers].

    Attributes:
        servers: The ranks that serve, the one that counts versions first.
        owners: The server of each parameter, by its name.
        waited_for: How often this rank has waited for another, by rank.
        unmade: What servers that are gone have not made of the last update, if anything.
    """

    def __init__(self, backend: Backend, shard: Shard) -> None:
        """``shard`` is what this rank serves."""
        self._backend, self._shard = backend, shard
        self.servers: Sequence[int] = ()
        self.owners: Mapping[str, int] = {}
        self._peers = backend.lend(shard)
        self.waited_for: Counter[int] = Counter()
        self.unmade: Unmade | None = None
        self._num_updates = 0

    def absent(self) -> list[int]:
        """The ranks that do nothing any more."""
        return [rank for rank in range(self._backend.size) if self._peers.absence(rank) is not None]

    def pull(
        self, like: Mapping[str, Tensor], *, begins: bool
    ) -> tuple[dict[str, Tensor], list[int]]:
        """The newest parameters, and their versions if an update ``begins`` with them.

        ``like`` has a tensor of each parameter's shape and dtype.
        """
        self._peers.hand_over()
        found: dict[str, Tensor] = {}
        versions: list[int] = []
        for server in self.servers:
            counts = begins and server == self.servers[0]
            names = [name for name in like if self.owners[name] == server]
            request = {
                "kind": "pull", "names": names, "rank": self._backend.rank, "begins": counts,
            }  # fmt: skip
            answer = self._call_in_turn(server, request)
            assert answer.values is not None
            values = unpack(answer.values, [like[name] for name in names])
            found |= dict(zip(names, values, strict=True))
            versions = versions or answer.data["versions"]
        return found, versions

    def push(
        self,
        optimizer: int,
        version: int,
        gradients: Mapping[str, Tensor],
        options: Sequence[Mapping[str, Any]],
    ) -> Admission:
        """Has the servers make a step of an optimizer with what was computed with a version."""
        self.unmade = None
        self._peers.hand_over()
        request = {
            "kind": "admit", "optimizer": optimizer, "rank": self._backend.rank, "version": version,
        }  # fmt: skip
        admission = Admission(**self._call_in_turn(self.servers[0], request).data)
        if admission.factor:
            self._num_updates += 1
            factor, number = admission.factor, self._num_updates
            self.make(Update(optimizer, number, factor, gradients, options), list(gradients))
        return admission

    def make(self, update: Update, wanted: Sequence[str]) -> None:
        """Has each server make its part of an update, as far as it is wanted.

        If servers are gone, the others make theirs all the same; see `unmade`.
        """
        lost: dict[int, list[str]] = {}
        error: ShoalError | None = None
        for server in self.servers:
            names = [name for name in wanted if self.owners[name] == server]
            try:
                if names:
                    self._push(server, update, names)
            except (PeerError, NotHeldError) as caught:
                error, lost[server] = caught, names
        if error is not None:
            self.unmade = Unmade(update, lost)
            raise error

    def _push(self, server: int, update: Update, names: Sequence[str]) -> None:
        request = {
            "kind": "push", "optimizer": update.optimizer, "names": list(names),
            "rank": self._backend.rank, "number": update.number,
            "factor": update.factor, "options": list(update.options),
        }  # fmt: skip
        values = pack([update.gradients[name] for name in names])
        self._call_in_turn(server, request, lambda: values)

    def mix(self, partner: int) -> None:
        """Averages this rank's parameters with another's; see [Note: gossip]."""
        request = {"kind": "mix", "rank": self._backend.rank}
        answer = self._call_in_turn(partner, request, self._shard.copy)
        assert answer.values is not None
        self._shard.subtract(answer.values)

    def _call(self, rank: int, request: dict[str, Any], values: Tensor | None) -> Answer:
        try:
            return self._peers.call(rank, request, values, Deadline(self._backend.timeout))
        except PeerError as error:
            if error.reason == absence_text(""):
                error.context += _STAY
            raise

    def _call_in_turn(
        self, rank: int, request: dict[str, Any], values: Callable[[], Tensor] | None = None
    ) -> Answer:
        """A call that may have to wait for the slowest rank; see [Note: staleness]."""
        deadline, waiting = Deadline(self._backend.timeout), None
        while True:
            answer = self._call(rank, request, None if values is None else values())
            slowest = answer.data.get("waits_for")
            if slowest is None:
                return answer
            if slowest != waiting:
                self.waited_for[slowest] += 1
                waiting = slowest
            self._await(slowest, deadline)

    def _await(self, slowest: int, deadline: Deadline) -> None:
        """Waits a little for a rank whose update would become too stale."""
        rank, other = self._backend.ranks[self._backend.rank], self._backend.ranks[slowest]
        reason = self._peers.absence(slowest)
        where = "it has pulled parameters and not pushed since"
        if reason is not None:
            raise PeerError(other, reason, staleness_text(0.0, rank, other, where))
        if not self._peers.hand_over():
            raise DeadlockError(staleness_text(0.0, rank, other, f"{where}, and cannot go on"))
        deadline.enforce(staleness_text, rank, other, where)
        if self._peers.takes_time:
            time.sleep(_POLL_S)

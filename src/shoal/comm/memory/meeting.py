"""Where the ranks of a simulated world come together for one operation."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from shoal.comm.memory import collectives as simulated
from shoal.comm.operation import Operation, Payload, check_message
from shoal.comm.operation.header import Header, check_equal
from shoal.errors import PeerError


class Meeting:
    """One operation of one group: the last rank to arrive carries it out for all."""

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        """``ranks`` are world ranks in group order, ``number`` is the group's operation."""
        self._ranks = ranks
        self._number = number
        self._arrivals: dict[int, tuple[Operation, Header]] = {}
        self._results: dict[int, Tensor | None] = {}
        self._errors: dict[int, BaseException] = {}
        self.num_bytes: dict[int, int] = {}
        self.is_over = False

    def missing(self) -> list[int]:
        """World ranks that have not arrived."""
        return [rank for rank in self._ranks if rank not in self._arrivals]

    def arrived(self) -> list[int]:
        """World ranks that have."""
        return sorted(self._arrivals)

    def arrive(self, rank: int, operation: Operation, header: Header) -> None:
        """The rank is here; if it is the last, the operation takes place."""
        self._arrivals[rank] = (operation, header)
        if not self.missing():
            try:
                self._take_place()
            except _Refused:
                pass
            except Exception as error:
                self._errors = {rank: _copied(error) for rank in self._ranks}
            self.is_over = True

    def withdraw(self, rank: int) -> None:
        """The rank gave up waiting: its tensors must not be touched any more."""
        if not self.is_over:
            self._arrivals.pop(rank, None)

    def result(self, rank: int) -> Tensor | None:
        """What the rank gets."""
        if rank in self._errors:
            raise self._errors[rank]
        return self._results[rank]

    def _take_place(self) -> None:
        operations = [self._arrivals[rank][0] for rank in self._ranks]
        headers = [self._arrivals[rank][1] for rank in self._ranks]
        if operations[0].kind in ("send", "recv"):
            payloads = self._deliver(operations, headers)
        else:
            payloads = self._perform(operations, headers)
        for rank, operation, payload in zip(self._ranks, operations, payloads, strict=True):
            self._results[rank] = operation.result()
            self.num_bytes[rank] = payload.num_bytes

    def _perform(self, operations: Sequence[Operation], headers: Sequence[Header]) -> list[Payload]:
        check_equal(headers, self._ranks, self._number)
        operations[0].check(headers, self._ranks)
        payloads = [self._prepared(i, operations[i], headers) for i in range(len(operations))]
        simulated.perform(operations[0].kind, payloads)
        return payloads

    def _deliver(self, operations: Sequence[Operation], headers: Sequence[Header]) -> list[Payload]:
        """``ranks`` of a message are its sender and its receiver."""
        check_message(headers[0], headers[1], (self._ranks[0], self._ranks[1]))
        sent = operations[0].prepare([headers[1]], 0)
        received = operations[1].prepare([headers[0]], 1)
        simulated.deliver(sent, received)
        return [sent, received]

    def _prepared(self, member: int, operation: Operation, headers: Sequence[Header]) -> Payload:
        try:
            return operation.prepare(headers, member)
        except Exception as error:
            # One rank's own mistake, which the others could not know of: as everywhere
            # else it raises there, and the others learn who failed.
            rank = self._ranks[member]
            reason = f"{type(error).__name__}: {error} ({headers[member].site})"
            self._errors = {other: PeerError(rank, reason) for other in self._ranks}
            self._errors[rank] = error
            raise _Refused from error


def _copied(error: Exception) -> Exception:
    """Each rank raises its own, for raising leaves a trace in it."""
    try:
        return copy.copy(error)
    except Exception:  # it cannot be rebuilt from its arguments
        return error


class _Refused(Exception):
    """Ends a meeting whose errors are already noted."""

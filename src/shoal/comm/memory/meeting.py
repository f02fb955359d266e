"""Where the ranks of a simulated world come together for one operation, and what it does.

The last rank to arrive carries it out for all ranks: it has all payloads at hand. The functions
here are also the plainest definition of each collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.operation import Operation, Payload, check_message, writing
from shoal.comm.operation.base import Header, check_equal
from shoal.comm.operation.partition import offsets
from shoal.comm.operation.reduction import reduce_into
from shoal.errors import PeerError
from shoal.system.public_call import place_of

Payloads = Sequence[Payload]


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
        kind = operations[0].kind
        if kind == "send":  # the ranks of a message are its sender and its receiver
            check_message(headers[0], headers[1], (self._ranks[0], self._ranks[1]))
            seen: list[Sequence[Header]] = [headers[1:], headers[:1]]
        else:
            check_equal(headers, self._ranks, self._number)
            operations[0].check(headers, self._ranks)
            seen = [headers] * len(headers)
        payloads = [self._prepared(i, operations[i], seen[i]) for i in range(len(operations))]
        if payloads[0].total:
            with writing(*(payload.target for payload in payloads)):
                _MOVE[kind](payloads)
        for rank, operation, payload in zip(self._ranks, operations, payloads, strict=True):
            self._results[rank] = operation.result()
            self.num_bytes[rank] = payload.num_bytes

    def _prepared(self, member: int, operation: Operation, headers: Sequence[Header]) -> Payload:
        try:
            return operation.prepare(headers, member)
        except Exception as error:
            # One rank's own mistake, which the others could not know of: as everywhere
            # else it raises there, and the others learn who failed.
            rank = self._ranks[member]
            place = place_of(self._arrivals[rank][1].site)
            reason = f"{type(error).__name__}: {error} ({place})"
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


# What the collectives do to the tensors of all ranks ----------------------------------------------


def _message(payloads: Payloads) -> None:
    payloads[1].gotten.copy_(payloads[0].given)


def _all_reduce(payloads: Payloads) -> None:
    total = _reduced(payloads)
    for payload in payloads:
        payload.gotten.copy_(total)


def _reduce(payloads: Payloads) -> None:
    payloads[payloads[0].root].gotten.copy_(_reduced(payloads))


def _reduced(payloads: Payloads) -> Tensor:
    inputs = [payload.given for payload in payloads]
    total = torch.empty_like(inputs[0])
    reduce_into(payloads[0].op, inputs, total)
    return total


def _reduce_scatter(payloads: Payloads) -> None:
    parts = _reduced(payloads).split(payloads[0].counts)
    for payload, part in zip(payloads, parts, strict=True):
        payload.gotten.copy_(part)


def _broadcast(payloads: Payloads) -> None:
    root = payloads[payloads[0].root]
    for payload in payloads:
        if payload is not root:
            payload.gotten.copy_(root.given)


def _all_gather(payloads: Payloads) -> None:
    joined = torch.cat([payload.given for payload in payloads])
    for payload in payloads:
        payload.gotten.copy_(joined)


def _gather(payloads: Payloads) -> None:
    joined = torch.cat([payload.given for payload in payloads])
    payloads[payloads[0].root].gotten.copy_(joined)


def _scatter(payloads: Payloads) -> None:
    parts = payloads[payloads[0].root].given.split(payloads[0].counts)
    for payload, part in zip(payloads, parts, strict=True):
        payload.gotten.copy_(part)


def _all_to_all(payloads: Payloads) -> None:
    parts = [payload.given.split(payload.counts) for payload in payloads]
    for receiver, payload in enumerate(payloads):
        starts = offsets(payload.arriving)
        for sender, start in enumerate(starts[:-1]):
            part = parts[sender][receiver]
            payload.gotten[start : start + part.numel()].copy_(part)


_MOVE: dict[str, Callable[[Payloads], None]] = {
    "send": _message,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}

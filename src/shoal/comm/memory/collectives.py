"""What the collectives do to the tensors of all ranks, seen from above.

In memory the last rank to arrive carries out the operation for all ranks: it has all
payloads at hand. These functions are also the plainest definition of each collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.operation import Payload, writing
from shoal.comm.operation.partition import offsets
from shoal.comm.operation.reduction import reduce_into

Payloads = Sequence[Payload]


def perform(kind: str, payloads: Payloads) -> None:
    """Carries out one operation; the payloads are in group order."""
    if payloads[0].total:
        with writing(*(payload.target for payload in payloads)):
            _PERFORM[kind](payloads)


def deliver(sent: Payload, received: Payload) -> None:
    """Carries a message over."""
    with writing(received.target):
        _target(received).copy_(_source(sent))


def _all_reduce(payloads: Payloads) -> None:
    total = _reduced(payloads)
    for payload in payloads:
        _target(payload).copy_(total)


def _reduce(payloads: Payloads) -> None:
    _target(payloads[payloads[0].root]).copy_(_reduced(payloads))


def _reduced(payloads: Payloads) -> Tensor:
    inputs = [_source(payload) for payload in payloads]
    total = torch.empty_like(inputs[0])
    reduce_into(payloads[0].op, inputs, total)
    return total


def _reduce_scatter(payloads: Payloads) -> None:
    parts = _reduced(payloads).split(payloads[0].counts)
    for payload, part in zip(payloads, parts, strict=True):
        _target(payload).copy_(part)


def _broadcast(payloads: Payloads) -> None:
    root = payloads[payloads[0].root]
    for payload in payloads:
        if payload is not root:
            _target(payload).copy_(_source(root))


def _all_gather(payloads: Payloads) -> None:
    joined = torch.cat([_source(payload) for payload in payloads])
    for payload in payloads:
        _target(payload).copy_(joined)


def _gather(payloads: Payloads) -> None:
    joined = torch.cat([_source(payload) for payload in payloads])
    _target(payloads[payloads[0].root]).copy_(joined)


def _scatter(payloads: Payloads) -> None:
    parts = _source(payloads[payloads[0].root]).split(payloads[0].counts)
    for payload, part in zip(payloads, parts, strict=True):
        _target(payload).copy_(part)


def _all_to_all(payloads: Payloads) -> None:
    parts = [_source(payload).split(payload.counts) for payload in payloads]
    for receiver, payload in enumerate(payloads):
        starts = offsets(payload.arriving)
        for sender, start in enumerate(starts[:-1]):
            part = parts[sender][receiver]
            _target(payload)[start : start + part.numel()].copy_(part)


def _source(payload: Payload) -> Tensor:
    assert payload.source is not None
    return payload.source


def _target(payload: Payload) -> Tensor:
    assert payload.target is not None
    return payload.target


_PERFORM: dict[str, Callable[[Payloads], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}

"""Objects of all kinds between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import shoal
from pools import Team


@dataclass
class Point:
    x: int
    y: object


def things(rank):
    """One thing of each kind, different on each rank."""
    return [
        None,
        True,
        rank - 1,
        1 << (70 + rank),
        0.1 * rank,
        float("inf"),
        f"rank {rank} \u00e4\U0001f40b\ud800",
        b"\x00" * rank,
        (rank, [rank, {rank}], {"a": (rank,), 3: None, (1, 2): frozenset([rank])}),
        Point(rank, [Point(0, rank)]),
        np.arange(rank, dtype=np.int16).reshape(rank, 1),
        "x" * (rank * 300_000),
    ]


def exchange_things():
    backend = shoal.world().backend
    rank, size = backend.rank, backend.size
    everybody = [things(peer) for peer in range(size)]
    last, after = size - 1, (rank + 1) % size
    checks = {
        "all_gather": _equal(backend.all_gather_object(things(rank)), everybody),
        "gather": backend.gather_object(things(rank), root=last),
        "broadcast": _equal(backend.broadcast_object(things(rank), root=last), everybody[last]),
        "scatter": _equal(
            backend.scatter_object(everybody if rank == last else None, root=last), everybody[rank]
        ),
        "all_to_all": _equal(
            backend.all_to_all_object([things(rank + peer) for peer in range(size)]),
            [things(peer + rank) for peer in range(size)],
        ),
    }
    checks["gather"] = (
        _equal(checks["gather"], everybody) if rank == last else checks["gather"] is None
    )
    if size > 1 and rank == 0:
        backend.send_object(things(0), after, tag=2)
    elif size > 1 and rank == 1:
        checks["message"] = _equal(backend.recv_object(src=0, tag=2), everybody[0])
    return checks


def _equal(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and (left == right).all()
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right


def test_objects_of_all_kinds(team: Team) -> None:
    for checks in team.run(exchange_things):
        assert all(checks.values()), checks


def exchange_tensors():
    backend = shoal.world().backend
    rank = backend.rank
    mine = {
        "weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t() + rank,
        "nothing": torch.empty(0, 4, dtype=torch.int16),
        "scalar": torch.tensor(rank, dtype=torch.uint8),
        "one": torch.arange(6).view(3, 2)[rank % 3 : rank % 3 + 1, 1],
        "flags": [torch.tensor([True, False]), (torch.ones(1, dtype=torch.complex64),)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    theirs = backend.broadcast_object(mine, root=backend.size - 1)
    alone = backend.all_gather_object(mine["weight"])[0]
    alone += 1  # it is the receiver's own
    return theirs, mine["weight"]


def test_objects_with_tensors(several: Team) -> None:
    results = several.run(exchange_tensors)
    last = several.size - 1
    for rank, (theirs, own) in enumerate(results):
        expected = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
        assert torch.equal(theirs["weight"], expected + last)
        assert torch.equal(own, expected + rank)
        assert theirs["nothing"].shape == (0, 4)
        assert theirs["nothing"].dtype is torch.int16
        assert theirs["scalar"].item() == last
        assert theirs["one"].tolist() == [2 * (last % 3) + 1]
        assert theirs["flags"][0].tolist() == [True, False]
        assert theirs["flags"][1][0].dtype is torch.complex64
        assert isinstance(theirs["parameter"], torch.nn.Parameter)


def broadcast_from_root():
    backend = shoal.world().backend
    value = object() if backend.rank != 0 else Point(1, 2)
    received = backend.broadcast_object(value)
    return received == Point(1, 2), (received is value) == (backend.rank == 0)


def test_only_the_roots_object_counts(several: Team) -> None:
    assert several.run(broadcast_from_root) == [(True, True)] * several.size


def wrong_lists():
    backend = shoal.world().backend
    errors = []
    try:
        backend.all_to_all_object([0] * (backend.size + 1))
    except ValueError as error:
        errors.append(str(error))
    try:
        backend.scatter_object([0] * (backend.size + 1), root=backend.rank)
    except ValueError as error:
        errors.append(str(error))
    backend.barrier()
    return errors


def test_a_list_of_the_wrong_length_is_an_error(several: Team) -> None:
    for errors in several.run(wrong_lists):
        assert len(errors) == 2
        assert all(f"{several.size} objects" in error for error in errors)


def hostile():
    """A world that does not vouch for its peers reads plain data only."""
    backend = shoal.world().backend
    secret, backend._seals._secret = backend._seals._secret, None
    try:
        plain = backend.all_gather_object([1, "two", torch.ones(3)])
        with pytest.raises(shoal.errors.UntrustedPickleError, match="SHOAL_TOKEN"):
            backend.all_gather_object(Point(1, 2))
    finally:
        backend._seals._secret = secret
    return len(plain)


def test_no_pickle_from_strangers(several: Team) -> None:
    assert several.run(hostile) == [several.size] * several.size

"""A call that is made again, with other tensors, is the call that would be made anew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shoal.comm.operation import AllGather, AllReduce, Operation, ReduceScatter
from shoal.comm.operation.base import Header
from shoal.comm.operation.reduction import ReduceOp

POSITION = (1, 2)


def one_made_again(kind: str) -> tuple[Operation, Operation]:
    """An operation on ones, made from another one, and the same made anew."""
    zeros, ones, parts = torch.zeros(4), torch.ones(4), [torch.empty(2), torch.empty(2)]
    if kind == "all_gather":
        wholes = torch.empty(8), torch.empty(8)
        return AllGather(ones, wholes[0]).again(wholes[1]), AllGather(ones, wholes[1])
    if kind == "all_reduce":
        return AllReduce(zeros, ReduceOp.MAX).again(ones), AllReduce(ones, ReduceOp.MAX)
    made = ReduceScatter(zeros, ReduceOp.SUM, parts[0], [2, 2], POSITION)
    return made.again(ones, parts[1]), ReduceScatter(ones, ReduceOp.SUM, parts[1], [2, 2], POSITION)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "reduce_scatter"])
def test_made_again_it_is_the_same_call(kind: str) -> None:
    again, anew = one_made_again(kind)
    assert (again.signature, again.meta) == (anew.signature, anew.meta)
    headers: Sequence[Header] = [Header(anew.signature, anew.meta, b"", "")] * 2
    found, expected = (each.prepare(headers, POSITION[0]) for each in (again, anew))
    assert found.given.data_ptr() == expected.given.data_ptr()
    assert found.gotten.data_ptr() == expected.gotten.data_ptr()
    assert (found.counts, found.op, found.total) == (expected.counts, expected.op, expected.total)
    assert again.result() is anew.result()

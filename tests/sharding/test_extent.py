"""Any two ways to cut a tensor: what they share is found exactly, and everything is reassembled."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.sharding.extent import Extent, overlap
from shoal.sharding.split import Split


@st.composite
def divisions(draw: st.DrawFn, shape: torch.Size) -> list[Extent]:
    """All of a tensor, cut into tensor-parallel parts, and each of these into runs."""
    extents = []
    for split in draw(splits(shape)):
        whole = Extent.whole(shape, split)
        cuts = draw(st.lists(st.integers(0, whole.stop), max_size=4))
        edges = [0, *sorted(cuts), whole.stop]
        extents += [whole.narrowed(a, b) for a, b in pairwise(edges)]
    return draw(st.permutations(extents))


@st.composite
def splits(draw: st.DrawFn, shape: torch.Size) -> list[Split | None]:
    """Parts of one dimension: every index belongs to one of them."""
    dim = draw(st.integers(-1, len(shape) - 1))
    if dim < 0:
        return [None]
    owners = draw(st.lists(st.integers(0, 2), min_size=shape[dim], max_size=shape[dim]))
    parts: list[Split | None] = []
    for owner in range(3):
        runs = [(index, index + 1) for index, each in enumerate(owners) if each == owner]
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if joined and joined[-1][1] == start and draw(st.booleans()):
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        if joined:
            parts.append(Split(shape, dim, tuple(draw(st.permutations(joined)))))
    return parts or [None]


@st.composite
def two_divisions(draw: st.DrawFn) -> tuple[torch.Size, list[Extent], list[Extent]]:
    shape = torch.Size(draw(st.lists(st.integers(0, 5), max_size=4)))
    return shape, draw(divisions(shape)), draw(divisions(shape))


def elements(full: Tensor, extent: Extent) -> Tensor:
    part = full if extent.split is None else extent.split.take(full)
    return part.reshape(-1)[extent.start : extent.stop]


@given(two_divisions())
def test_everything_is_reassembled(case: tuple[torch.Size, list[Extent], list[Extent]]) -> None:
    shape, writers, readers = case
    full = torch.arange(shape.numel()).reshape(shape)
    for reader in readers:
        memory = torch.full((reader.num_elements,), -1)
        for writer in writers:
            source = elements(full, writer)
            for left, right, length in zip(*overlap(writer, reader), strict=True):
                assert (memory[right : right + length] == -1).all()  # each element once
                memory[right : right + length] = source[left : left + length]
        assert torch.equal(memory, elements(full, reader))


@given(two_divisions())
def test_runs_are_as_long_as_they_can_be(case: Any) -> None:
    _, writers, readers = case
    for writer in writers:
        for reader in readers:
            left, right, lengths = overlap(writer, reader)
            assert (lengths > 0).all()
            ends = (left + lengths)[:-1], (right + lengths)[:-1]
            assert not ((ends[0] == left[1:]) & (ends[1] == right[1:])).any()


def test_tensors_of_different_shapes_share_nothing() -> None:
    with pytest.raises(ValueError, match=r"one shape: got \(2,\) and \(3,\)"):
        overlap(Extent.whole(torch.Size([2])), Extent.whole(torch.Size([3])))


def test_a_row_split_meets_a_column_split() -> None:
    shape = torch.Size([4, 6])
    rows = Extent.whole(shape, Split(shape, 0, ((1, 3),)))
    columns = Extent.whole(shape, Split(shape, 1, ((0, 2), (5, 6))))
    left, right, lengths = overlap(rows, columns)
    assert (left.tolist(), right.tolist(), lengths.tolist()) == (
        [0, 5, 11],
        [3, 5, 8],
        [2, 3, 1],  # the end of a row and the beginning of the next are one run
    )

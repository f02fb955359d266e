"""Who owns which slice: everything is owned once, whatever the sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.sharding.layout import GroupLayout, balanced_owners

Shapes = list[tuple[str, torch.Size]]
shapes_lists = st.lists(
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size), min_size=1, max_size=12
).map(lambda shapes: [(f"p{index}", shape) for index, shape in enumerate(shapes)])
worlds = st.integers(1, 9)


def owned(layout: GroupLayout, ranks: int) -> dict[str, list[tuple[int, int]]]:
    """The parts of each parameter that somebody owns, in rank order."""
    parts: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in layout.slots}
    for rank in range(ranks):
        for piece in layout.pieces(rank):
            parts[piece.name].append((piece.start, piece.stop))
    return parts


def assert_owned_once(layout: GroupLayout, ranks: int) -> None:
    for slot in layout.slots:
        position = 0
        for start, stop in owned(layout, ranks)[slot.name]:
            assert start == position
            assert stop > start
            position = stop
        assert position == slot.shape.numel()


@given(shapes=shapes_lists, ranks=worlds, block=st.sampled_from([2, 7, 32]), chosen=st.booleans())
def test_blocks_are_of_one_parameter_and_one_rank(
    shapes: Shapes, ranks: int, block: int, chosen: bool
) -> None:
    if chosen:
        layout = GroupLayout.even(shapes, ranks, 4, block)
    else:
        owners = balanced_owners([shape.numel() for _, shape in shapes], ranks, [0] * ranks)
        layout = GroupLayout.whole(shapes, owners, ranks, block)
    assert_owned_once(layout, ranks)
    assert all(edge % block == 0 for edge in layout.bounds)
    assert all(slot.start % block == 0 for slot in layout.slots)
    covered = [*layout.gaps, *(slot.bounds for slot in layout.slots if slot.start < slot.stop)]
    assert sorted(covered) == sorted(set(covered))
    assert sum(stop - start for start, stop in covered) == layout.num_elements
    assert all(start < stop for start, stop in layout.gaps)


def assert_in_a_row(layout: GroupLayout) -> None:
    position = 0
    for slot in layout.slots:
        assert slot.bounds == (position, position + slot.shape.numel())
        position = slot.stop
    assert position <= layout.num_elements


@given(shapes=shapes_lists, ranks=worlds, itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_even_slices_cover_everything_once(shapes: Shapes, ranks: int, itemsize: int) -> None:
    layout = GroupLayout.even(shapes, ranks, itemsize)
    assert [(slot.name, slot.shape) for slot in layout.slots] == shapes
    assert_in_a_row(layout)
    assert_owned_once(layout, ranks)
    assert len(set(layout.sizes)) == 1
    assert len(layout.sizes) == ranks
    assert sum(layout.sizes) == layout.num_elements
    # Slices begin at multiples of 128 bytes, and padding is less than that for each rank.
    assert all(bound * itemsize % 128 == 0 for bound in layout.bounds)
    used = sum(shape.numel() for _, shape in shapes)
    assert layout.num_elements - used < ranks * math.ceil(128 / itemsize)


@given(shapes=shapes_lists, ranks=worlds, data=st.data())
def test_whole_parameters_belong_to_their_owner(
    shapes: Shapes, ranks: int, data: st.DataObject
) -> None:
    owner = st.integers(0, ranks - 1)
    owners = data.draw(st.lists(owner, min_size=len(shapes), max_size=len(shapes)))
    layout = GroupLayout.whole(shapes, owners, ranks)
    assert sorted((slot.name, slot.shape) for slot in layout.slots) == sorted(shapes)
    assert_in_a_row(layout)
    assert_owned_once(layout, ranks)
    assert layout.num_elements == sum(shape.numel() for _, shape in shapes)
    for rank in range(ranks):
        names = {piece.name for piece in layout.pieces(rank)}
        mine = {
            name
            for (name, shape), who in zip(shapes, owners, strict=True)
            if who == rank and shape.numel()
        }
        assert names == mine


@given(shapes=shapes_lists, ranks=worlds)
def test_pieces_put_together_are_the_parameters(shapes: Shapes, ranks: int) -> None:
    layout = GroupLayout.even(shapes, ranks, 4)
    whole = torch.arange(layout.num_elements)
    shards = whole.split(layout.sizes)
    for slot in layout.slots:
        parts = [
            shards[rank][piece.offset : piece.offset + piece.stop - piece.start]
            for rank in range(ranks)
            for piece in layout.pieces(rank)
            if piece.name == slot.name
        ]
        joined = torch.cat(parts) if parts else whole[:0]
        assert torch.equal(joined, whole[slot.start : slot.stop])


def test_slices_cut_through_parameters() -> None:
    layout = GroupLayout.even([("a", torch.Size([3])), ("b", torch.Size([10, 10]))], 2, 4)
    assert layout.bounds == (0, 64, 128)
    assert [(p.name, p.start, p.stop, p.offset) for p in layout.pieces(0)] == [
        ("a", 0, 3, 0),
        ("b", 0, 61, 3),
    ]
    assert [(p.name, p.start, p.stop, p.offset) for p in layout.pieces(1)] == [("b", 61, 100, 0)]


def test_a_rank_may_own_nothing() -> None:
    layout = GroupLayout.even([("a", torch.Size([3]))], 4, 4)
    assert [len(layout.pieces(rank)) for rank in range(4)] == [1, 0, 0, 0]


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), ranks=worlds, start=st.integers(0, 500))
def test_owners_are_balanced(sizes: list[int], ranks: int, start: int) -> None:
    load = [start] * ranks
    owners = balanced_owners(sizes, ranks, load)
    assert len(owners) == len(sizes)
    assert all(0 <= owner < ranks for owner in owners)
    assert sum(load) == start * ranks + sum(sizes)
    for rank in range(ranks):
        mine = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        assert load[rank] == start + mine
    # The largest first to whoever has least: nobody is ahead by more than one parameter.
    if sizes:
        assert max(load) - min(load) <= max(sizes)


def test_load_of_earlier_groups_counts() -> None:
    load = [0, 0]
    assert balanced_owners([5], 2, load) == [0]
    assert balanced_owners([3, 1], 2, load) == [1, 1]
    assert load == [5, 4]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_owners_are_the_same_each_time(ranks: int) -> None:
    sizes = [7, 7, 3, 100, 5]
    assert balanced_owners(sizes, ranks, [0] * ranks) == balanced_owners(sizes, ranks, [0] * ranks)

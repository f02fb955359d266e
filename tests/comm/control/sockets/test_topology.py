"""The graph of a group, as such."""

from __future__ import annotations

import pytest

from shoal.comm.control.sockets import topology

SIZES = [9, 10, 16, 31, 33, 64]


def graph(size: int) -> dict[int, set[int]]:
    return {rank: set(topology.neighbours(rank, range(size))) for rank in range(size)}


@pytest.mark.parametrize("size", [1, 2, 8])
def test_small_groups_are_connected_in_pairs(size: int) -> None:
    assert graph(size) == {rank: set(range(size)) - {rank} for rank in range(size)}


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_are_mutual_and_few(size: int) -> None:
    found = graph(size)
    for rank, others in found.items():
        assert rank not in others
        assert all(rank in found[other] for other in others)
        assert len(others) <= 2 * topology.num_rounds(size)


@pytest.mark.parametrize("size", SIZES)
def test_the_graph_stays_in_one_piece_without_any_two_ranks(size: int) -> None:
    found = graph(size)
    for first in range(size):
        for second in range(size):
            rest = set(range(size)) - {first, second}
            assert reachable(found, rest) == rest


def reachable(found: dict[int, set[int]], among: set[int]) -> set[int]:
    seen, new = set[int](), {min(among)}
    while new:
        seen |= new
        new = {other for rank in new for other in found[rank] & among} - seen
    return seen


def test_a_group_of_some_ranks_has_a_graph_of_its_own() -> None:
    ranks = list(range(0, 64, 4))
    assert topology.neighbours(0, ranks) == [4, 8, 16, 32, 48, 56, 60]


def test_the_growth_to_4096_ranks() -> None:
    assert len(topology.neighbours(0, range(4096))) == 23
    assert topology.num_rounds(4096) == 12

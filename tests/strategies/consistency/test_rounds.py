"""Turns within a round: each group once, in one order, whatever a rank asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.strategies.consistency.rounds import Round

orders = st.integers(1, 8).flatmap(lambda count: st.permutations(range(count)))


def test_needing_a_group_lets_those_before_it_go_first() -> None:
    turns = Round([2, 0, 1])
    assert turns.following() == 2
    assert not turns.has_had(2)
    assert turns.until(0) == [2, 0]
    assert turns.has_had(2)
    assert turns.has_had(0)
    assert not turns.has_had(1)
    assert turns.following() == 1


def test_a_turn_that_is_over_does_not_come_again() -> None:
    turns = Round([2, 0, 1])
    assert turns.until(1) == [2, 0, 1]
    assert turns.until(0) == []
    assert turns.following() is None


def test_the_rest_completes_the_round() -> None:
    turns = Round([2, 0, 1])
    turns.until(2)
    assert turns.rest() == [0, 1]
    assert turns.rest() == []
    assert turns.following() is None


def test_what_comes_behind_a_group() -> None:
    turns = Round([2, 0, 1, 3])
    assert list(turns.behind(2)) == [0, 1, 3]
    turns.until(1)
    assert list(turns.behind(0)) == [1, 3]
    assert list(turns.behind(3)) == []
    assert turns.following() == 3


def test_a_round_of_no_groups() -> None:
    turns = Round([])
    assert list(turns.behind(0)) == []
    assert turns.following() is None
    assert turns.rest() == []


@given(order=orders, data=st.data())
def test_whatever_is_asked_for_the_turns_are_the_order(
    order: list[int], data: st.DataObject
) -> None:
    """So ranks that need different groups still issue the same collectives."""
    turns = Round(order)
    issued: list[int] = []
    for wanted in data.draw(st.lists(st.sampled_from(order), max_size=10)):
        had = turns.has_had(wanted)
        assert had == (wanted in issued)
        issued += turns.until(wanted)
        assert wanted in issued
        assert issued == order[: len(issued)]
        expected = order[len(issued)] if len(issued) < len(order) else None
        assert turns.following() == expected
    assert issued + turns.rest() == order

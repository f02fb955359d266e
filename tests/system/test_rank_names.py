"""Ranks as text: with a noun that fits, and short however many there are."""

import pytest

from shoal.system.rank_names import list_names, name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "nobody"), ([3], "rank 3"), ([0, 2], "ranks 0, 2"), (range(2), "ranks 0, 1")],
)
def test_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_many_ranks_are_counted() -> None:
    text = name_ranks(range(100))
    assert text.startswith("ranks 0, 1, ")
    assert text.endswith(", 15, ... (100 ranks)")


def test_names() -> None:
    assert list_names(["a", "b"], most=2) == "a, b"
    assert list_names(["a", "b", "c"], most=2) == "a, b and 1 more"

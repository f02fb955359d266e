"""Versions and staleness, by themselves: bounds hold, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.strategies.independent.versions import VersionCount


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.sampled_from(["drop", "damp", "wait"]),
    st.lists(st.integers(0, 4), max_size=80),
)
def test_any_order_of_ranks(most: int, when_stale: str, order: list[int]) -> None:
    """Each rank pulls and pushes in turn, in any order of ranks."""
    ledger, pulled, counted = VersionCount(most, when_stale), dict[int, int](), 0
    for rank in [*order, *range(5), *range(5), *range(5)]:
        event = "push" if rank in pulled else "pull"
        waits_for = ledger.blocking(rank, event)
        if waits_for is not None:
            assert when_stale == "wait"
            assert waits_for in pulled
            # Whoever is waited for has the oldest version, and need not wait.
            assert pulled[waits_for] == min(pulled.values())
            assert ledger.blocking(waits_for, "push") is None
            continue
        if event == "pull":
            pulled[rank] = ledger.begin(rank)
            assert pulled[rank] == counted
            continue
        version = pulled.pop(rank)
        staleness, factor = ledger.admit(rank, version)
        assert staleness == counted - version
        counted += factor > 0
        assert ledger.version == counted
        if staleness <= most:
            assert factor == 1.0
        elif when_stale == "damp":
            assert factor == (1 + most) / (1 + staleness) < 1
        else:
            assert when_stale == "drop"
            assert factor == 0.0


def test_a_staleness_of_zero_is_one_rank_at_a_time() -> None:
    ledger = VersionCount(0, "wait")
    ledger.begin(0)
    assert ledger.blocking(1, "pull") == 0
    ledger.admit(0, 0)
    assert ledger.blocking(1, "pull") is None


def test_events_are_kept_where_they_are_wanted() -> None:
    ledger = VersionCount(0, "drop")
    ledger.begin(0)
    ledger.events = []
    ledger.begin(1)
    ledger.admit(0, 0)
    ledger.admit(1, 0)
    assert ledger.events == [("pull", 1, 1.0), ("push", 0, 1.0), ("push", 1, 0.0)]

"""Flags that ride in headers: what any rank names, all ranks learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.strategies.gradients.reductions import Flags

counts = st.integers(1, 200)


@given(count=counts, data=st.data())
def test_flags_are_united_over_all_ranks(count: int, data: st.DataObject) -> None:
    named = data.draw(st.lists(st.sets(st.integers(0, count - 1)), min_size=1, max_size=4))
    ranks = [Flags(own, count) for own in named]
    headers: list[Any] = [SimpleNamespace(meta=flags.words) for flags in ranks]
    for flags in ranks:
        flags.unite(headers)
        assert flags.union == set().union(*named)

"""How a length is shared out over ranks."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from shoal.comm.operation.partition import check_sizes, offsets, split_sizes


@hypothesis.given(length=st.integers(0, 10**6), num_parts=st.integers(1, 100))
def test_parts_are_even_and_the_first_are_longer(length, num_parts) -> None:
    sizes = split_sizes(length, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == length
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@hypothesis.given(st.lists(st.integers(0, 100)))
def test_offsets_are_where_parts_begin(sizes) -> None:
    starts = offsets(sizes)
    assert starts[0] == 0
    assert starts[-1] == sum(sizes)
    assert [after - before for before, after in itertools.pairwise(starts)] == sizes


@pytest.mark.parametrize("sizes", [[3], [3, 3, 3], [2, 3], [7, -1], []])
def test_sizes_that_do_not_add_up_are_refused(sizes) -> None:
    with pytest.raises(ValueError, match=r"2 non-negative numbers that add up to 6 rows; got"):
        check_sizes(sizes, 6, 2)
    assert check_sizes((6, 0), 6, 2) == [6, 0]

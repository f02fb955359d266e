"""How one dimension is shared out: in whole units, section by section, with nothing left over."""

from __future__ import annotations

import pytest
import torch

from shoal.strategies.tensor.plan.cut import Cut, Section


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "cut", [Cut.of(10), Cut.of(12, unit=2), Cut.of(12, 2, 2), Cut((Section(8, 4), Section(4, 2)))]
)
def test_every_index_belongs_to_one_rank(cut: Cut, num_ranks: int) -> None:
    assert sorted(cut.order(num_ranks)) == list(range(cut.size))
    lengths = [cut.length(rank, num_ranks) for rank in range(num_ranks)]
    assert sum(lengths) == cut.size
    assert (len(set(lengths)) == 1) == cut.is_even(num_ranks)


def test_units_stay_together_and_first_ranks_get_more() -> None:
    assert [Cut.of(12, unit=4).runs(rank, 2) for rank in range(2)] == [((0, 8),), ((8, 12),)]


def test_sections_are_shared_out_one_by_one() -> None:
    cut = Cut((Section(8, 4), Section(4, 2)))
    assert cut.runs(1, 2) == ((4, 8), (10, 12))
    assert cut.num_units == 2


def test_splits_take_the_indices_of_a_rank() -> None:
    whole = torch.arange(12).view(2, 6)
    split = Cut.of(6, num_sections=2).splits(whole.shape, 1, 3)[1]
    assert split.take(whole).tolist() == [[1, 4], [7, 10]]

"""How far two trainings may be apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.verification.comparison import Comparison, default_tolerance
from shoal.verification.trainers.trainer import Observed


@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [
        ([torch.float64], 1e-10),
        ([torch.float64, torch.float32], 1e-5),
        ([torch.float32, torch.bfloat16], 1e-2),
        ([], 1e-5),
    ],
)
def test_default_tolerance(dtypes, tolerance) -> None:
    assert default_tolerance(nn.ModuleList(nn.Linear(1, 1).to(d) for d in dtypes)) == tolerance


@pytest.mark.parametrize(
    ("expected", "got", "is_same"),
    [
        (torch.ones(3), torch.ones(3) + 1.9e-5, True),
        (torch.ones(3), torch.ones(3) + 2.1e-5, False),
        (None, None, True),
        (None, torch.zeros(3), True),
        (torch.ones(3), None, False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
        (torch.ones(1), torch.tensor([float("nan")]), False),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_what_counts_as_equal(expected, got, is_same) -> None:
    comparison = Comparison(1e-5)
    step = [Observed("parameter", "w", expected)], [Observed("parameter", "w", got)]
    assert comparison.compare(0, *step) is is_same
    assert (comparison.first is None) is is_same


def test_gradients_are_measured_against_the_largest() -> None:
    comparison = Comparison(1e-5)
    small = Observed("gradient", "w", torch.tensor([1e-8]), scale=1e-3)
    assert comparison.compare(0, [small], [Observed("gradient", "w", torch.tensor([1.5e-8]))])
    assert not comparison.compare(1, [small], [Observed("gradient", "w", torch.tensor([5e-8]))])
    assert comparison.first.step == 2

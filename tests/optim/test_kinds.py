"""Kinds are ordered from fine to coarse, and every strategy divides each of them somehow."""

from __future__ import annotations

import itertools

import pytest

from shoal.errors import ShoalError
from shoal.optim import PAIRS, Kind
from shoal.optim.division import DIVISIONS, WorkDivision


def test_kinds_are_ordered() -> None:
    for finer, coarser in itertools.combinations(Kind, 2):
        assert finer.is_finer_than(coarser)
        assert not coarser.is_finer_than(finer)
    assert not any(kind.is_finer_than(kind) for kind in Kind)


def test_users_may_name_them() -> None:
    assert [Kind(name) for name in ("element-wise", "per-parameter", "global")] == list(Kind)


def test_a_kind_that_a_strategy_cannot_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = PAIRS["tensor"].optimizer
    monkeypatch.setattr(wrapper, "divisions", {Kind.GLOBAL: DIVISIONS[Kind.GLOBAL]})
    assert wrapper.division_for(Kind.GLOBAL) is DIVISIONS[Kind.GLOBAL]
    with pytest.raises(ShoalError, match=r"'tensor' cannot .* element-wise: .*Optimizer.divisions"):
        wrapper.division_for(Kind.ELEMENT_WISE)


@pytest.mark.parametrize("strategy", PAIRS)
def test_every_kind_is_divided_by_every_strategy(strategy: str) -> None:
    divisions = PAIRS[strategy].optimizer.divisions
    assert divisions.keys() >= {Kind.ELEMENT_WISE, Kind.PER_PARAMETER, Kind.GLOBAL}
    assert DIVISIONS.keys() == set(Kind)  # others may refuse a new one
    for kind, division in divisions.items():  # servers make whole steps, whatever the kind
        assert issubclass(division, WorkDivision if strategy == "async" else DIVISIONS[kind])

"""The tables of usual names: every pattern can be found, and none hides a longer one."""

from __future__ import annotations

import pytest
from torch import nn

from shoal.strategies.tensor.plan.candidates import find_candidates
from shoal.strategies.tensor.plan.known_names import ATTENTION, FEED_FORWARD, Pattern


def module_with(paths: tuple[str, ...]) -> nn.Module:
    module = nn.Module()
    for path in paths:
        *outer, name = path.split(".")
        owner = module
        for each in outer:
            if each not in dict(owner.named_children()):
                owner.add_module(each, nn.Module())
            owner = owner.get_submodule(each)
        owner.add_module(name, nn.Linear(8, 8))
    return module


@pytest.mark.parametrize("pattern", [*ATTENTION, *FEED_FORWARD], ids=lambda each: each[0][0])
def test_the_first_candidate_is_the_pattern_itself(pattern: Pattern) -> None:
    columns, rows = pattern
    for row in rows:
        first = next(find_candidates("", module_with((*columns, row))))
        assert (first.columns, first.row, first.is_named) == (columns, row, True)

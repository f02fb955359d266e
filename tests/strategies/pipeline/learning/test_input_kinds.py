"""Which inputs take the same route through a model."""

from __future__ import annotations

import torch
from torch import nn

from shoal.strategies.pipeline.learning.input_kinds import kind_of, mode_of


def test_numbers_in_tensors_do_not_count() -> None:
    assert kind_of((torch.zeros(2, 3), {"n": 1})) == kind_of((torch.ones(2, 3), {"n": 1}))


def test_sizes_are_apart_from_structure() -> None:
    short, long = kind_of(torch.zeros(2, 3)), kind_of(torch.zeros(2, 4))
    assert short.structure == long.structure
    assert short.sizes != long.sizes


def test_structure_has_dtypes_dimensions_and_plain_values() -> None:
    x = torch.zeros(2, 3)
    others = [x.double(), x[0], (x,), [x], (x, True), (x, 1), (x, "1"), (x, None), {"x": x}]
    kinds = [kind_of(each).structure for each in (x, *others)]
    assert len(set(kinds)) == len(kinds)


def test_modes_of_a_model() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    modes = [mode_of(module)]
    with torch.no_grad():
        modes.append(mode_of(module))
    with torch.autocast("cpu", torch.bfloat16):
        modes.append(mode_of(module))
    module[1].eval()
    modes.append(mode_of(module))
    assert len(set(modes)) == 4

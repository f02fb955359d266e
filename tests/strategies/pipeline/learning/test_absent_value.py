"""Absent values: what can be done without numbers, and what is noted while a route is learned."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.absent_value import (
    AbsentValue,
    ValueRecorder,
    absent_like,
    hide,
)
from shoal.strategies.pipeline.learning.route import ValueId

BLOCK, WEIGHT = ValueId(3, 0, "blocks.3"), ValueId.of_parameter("head.weight")
CPU = torch.device("cpu")


def test_shapes_are_computed_without_numbers() -> None:
    value = absent_like((2, 3), torch.float32, CPU, BLOCK)
    result = (value @ torch.ones(3, 4)).relu().to(torch.bfloat16)
    assert isinstance(result, AbsentValue)
    assert (result.shape, result.dtype, result.device) == ((2, 4), torch.bfloat16, CPU)
    assert result.sources == {BLOCK}


def test_what_needs_the_shape_only_is_real() -> None:
    value = absent_like((2, 3), torch.float32, CPU, BLOCK)
    assert torch.equal(torch.zeros_like(value), torch.zeros(2, 3))
    assert torch.equal(value.new_ones(2), torch.ones(2))


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value.sum().item(),
        lambda value: bool((value > 0).any()),
        lambda value: value.nonzero(),
        lambda value: torch.zeros(2, 3).add_(value),
    ],
)
def test_numbers_are_an_error_that_names_the_unit(use) -> None:
    with pytest.raises(ShoalError, match=r"needs a value that blocks\.3 computed"):
        use(absent_like((2, 3), torch.float32, CPU, BLOCK))


def test_parameters_are_named_as_such() -> None:
    with pytest.raises(ShoalError, match=r"other ranks of the pipeline have head\.weight"):
        absent_like((2,), torch.float32, CPU, WEIGHT).sum().item()


def test_uses_and_writes_are_recorded() -> None:
    recorder = ValueRecorder({"head.weight": torch.full((2,), 5.0)}.__getitem__)
    real = torch.arange(3.0)
    value = hide(real, BLOCK, recorder, needs_grad=False)
    doubled = value * 2
    assert not recorder.used
    assert torch.equal(recorder.use(doubled), real * 2)
    assert recorder.used == {BLOCK}
    assert not recorder.written
    value.add_(1)
    assert recorder.written == {BLOCK}
    weight = AbsentValue(torch.empty(2, device="meta"), CPU, frozenset([WEIGHT]), recorder)
    assert (weight + 1).sum().item() == 12
    assert recorder.used == {BLOCK, WEIGHT}

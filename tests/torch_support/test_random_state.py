"""Random generators that are put aside and restored, here or by another process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shoal.torch_support.random_state import RandomState, RandomStream


def draw() -> tuple[Any, ...]:
    return torch.rand(()).item(), np.random.rand(), random.random(), np.random.randn()


def test_restored() -> None:
    draw()  # numpy keeps the second of two normal numbers
    state = RandomState.capture()
    first = draw()
    state.restore()
    assert draw() == first


def test_restored_from_plain_values() -> None:
    draw()
    state = RandomState.capture().to_plain()
    first = draw()
    RandomState.from_plain(state).restore()
    assert draw() == first


@pytest.mark.parametrize("key", ["torch", "cuda", "numpy", "python"])
@pytest.mark.parametrize("value", [None, 3, [1, 2], [torch.zeros(3)] * 5])
def test_plain_values_that_are_no_state(key: str, value: Any) -> None:
    if key == "cuda" and isinstance(value, list) and torch.is_tensor(value[0]):
        pytest.skip("of another number of GPUs, which is fine")
    before = RandomState.capture()
    expected = draw()
    before.restore()
    with pytest.raises(ValueError, match="no states of random generators"):
        RandomState.from_plain({**RandomState.capture().to_plain(), key: value})
    assert draw() == expected


def test_branches_differ() -> None:
    state = RandomState.capture()
    drawn = []
    for number in (1, 2, 1):
        state.restore_branch(number)
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]
    state.restore()


def test_streams_do_not_disturb_each_other() -> None:
    outside = RandomState.capture()
    alone = [draw(), draw()]
    outside.restore()
    left, right = RandomStream(1), RandomStream(1)
    numbers = []
    for stream in (left, right, left, right):
        with stream.drawing():
            numbers.append(draw())
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert [draw(), draw()] == alone

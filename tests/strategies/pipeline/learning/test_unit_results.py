"""What units return and leave in attributes, as data that is sent."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils._pytree import tree_flatten

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.route import TensorShape
from shoal.strategies.pipeline.learning.unit_results import (
    check_dataclasses,
    decode_leaf,
    encode_leaf,
    example_of,
    read_attributes,
    structure_of,
    tensors_in,
    tensors_since,
    write_attributes,
)


@dataclass
class Pair:
    one: torch.Tensor
    two: int


@pytest.mark.parametrize(
    "tree",
    [
        {"a": torch.zeros(9), "b": [None, (1, "x")]},
        rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]),
    ],
)
def test_structures_survive_as_examples(tree) -> None:
    leaves, structure = tree_flatten(tree)
    assert structure_of(example_of(structure, leaves)) == structure


@pytest.mark.parametrize("leaf", [TensorShape((2, 0), torch.bfloat16), None, 3, "text"])
def test_leaves_survive_as_plain_data(leaf) -> None:
    assert decode_leaf(encode_leaf(leaf)) == leaf


def test_dataclasses_that_torch_does_not_know_are_refused() -> None:
    with pytest.raises(ShoalError, match=r"register_dataclass\(Pair\)"):
        check_dataclasses("blocks.0", [Pair(torch.zeros(1), 1)])
    check_dataclasses("blocks.0", [torch.zeros(1), 3, Pair])


def test_attributes_are_found_read_and_written() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].map = torch.zeros(1)
    before = tensors_in(module)
    assert list(before) == ["0.map"]
    module[1].loss = torch.ones(())
    assert list(tensors_since(module, before)) == ["1.loss"]
    assert read_attributes(module, ["1.loss", "1.none"]) == {
        "1.loss": module[1].loss,
        "1.none": None,
    }
    other = torch.zeros(2)
    write_attributes(module, {"1.loss": other})
    assert module[1].loss is other

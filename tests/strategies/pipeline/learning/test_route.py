"""Routes: what each chunk sends and receives, from what it wants."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils._pytree import tree_flatten

from shoal.errors import ShoalError
from shoal.strategies.pipeline import Pass
from shoal.strategies.pipeline.learning.route import (
    Route,
    TensorShape,
    UnitCall,
    ValueId,
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

STRUCTURE = tree_flatten((0, {}))[1]
EMBEDDING, BLOCK, MASK = (
    ValueId(0, 0, "embedding"),
    ValueId(1, 0, "block"),
    ValueId(0, 1, "embedding"),
)


def _route() -> Route:
    """Chunk 1 wants the embedding and a mask, chunk 2 the block's output and the embedding."""
    calls = [
        UnitCall("embedding", 0, STRUCTURE, [], [], needs_grad={0}),
        UnitCall("block", 1, STRUCTURE, [], [], needs_grad={0}),
        UnitCall("head", 2, STRUCTURE, [], [], needs_grad={0}),
    ]
    wanted = {0: [], 1: [EMBEDDING, MASK], 2: [EMBEDDING, BLOCK]}
    return Route(calls, wanted, {0: set(), 1: set(), 2: set()}, {0: [], 1: [], 2: []})


def test_values_go_from_the_chunk_that_has_them_to_those_that_want_them() -> None:
    route = _route()
    assert route.receives[Pass.FORWARD, 0] == {}
    assert route.receives[Pass.FORWARD, 2] == {0: [EMBEDDING], 1: [BLOCK]}
    assert route.sends[Pass.FORWARD, 0] == {1: [EMBEDDING, MASK], 2: [EMBEDDING]}
    assert route.exported == {0: {EMBEDDING, MASK}, 1: {BLOCK}, 2: set()}


def test_gradients_go_the_opposite_way_where_there_are_any() -> None:
    route = _route()
    assert route.needs_grad == {EMBEDDING, BLOCK}
    assert route.sends[Pass.BACKWARD, 1] == {0: [EMBEDDING]}
    assert route.receives[Pass.BACKWARD, 0] == {1: [EMBEDDING], 2: [EMBEDDING]}
    assert route.receives[Pass.WEIGHTS, 0] == {}


def test_what_is_sent_is_received_in_the_same_order() -> None:
    route = _route()
    for kind in (Pass.FORWARD, Pass.BACKWARD):
        sent = {(a, b): ids for a in range(3) for b, ids in route.sends[kind, a].items()}
        received = {(a, b): ids for b in range(3) for a, ids in route.receives[kind, b].items()}
        assert sent == received


def test_parameters_are_not_computed() -> None:
    assert EMBEDDING.is_computed
    assert not ValueId.of_parameter("weight").is_computed


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

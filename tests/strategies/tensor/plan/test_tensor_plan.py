"""The plan as a table, and the names of splits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies.tensor import Style, TensorPlan, draft
from shoal.strategies.tensor.plan.tensor_plan import (
    Cut,
    Layer,
    Section,
    SplitBlock,
    describe_rest,
    drop_contradictions,
    find_contradiction,
    join_names,
    parameter_splits,
    parse_style,
    starred,
)
from strategies.tensor.tasks import GPT, FeedForward


def test_the_plan_prints_as_a_table() -> None:
    text = str(draft(nn.Sequential(*(FeedForward(4, 7) for _ in range(3))), 2))
    assert text.splitlines()[0] == "tensor parallel over 2 ranks: 9 layers split"
    assert "*.gate_proj (3)  column      4/3 of 7" in text
    assert "note: blocks.2.mlp is computed whole" in str(draft(GPT(), 2))
    assert "whole on every rank: 100.0% of 20 elements, most of it in weight, bias" in str(
        draft(nn.Linear(4, 4), 2)
    )

    def show() -> str:
        return str(shoal.as_distributed(GPT(), strategy="tensor").plan)

    assert shoal.run(show, 2, "memory")[1] == str(draft(GPT(), 2))


@pytest.mark.parametrize(
    ("text", "style"),
    [("column", Style.COLUMN), ("rowwise", Style.ROW), ("vocab", Style.VOCABULARY), ("what", None)],
)
def test_names_of_splits(text: str, style: Style | None) -> None:
    assert parse_style(text) is style


def test_layers_of_a_stack_have_one_pattern() -> None:
    assert starred("blocks.0.mlp.fc1") == starred("blocks.12.mlp.fc1") == "blocks.*.mlp.fc1"


def shapes(module: nn.Module, style: Style, size: int) -> dict[str, tuple[int, ...]]:
    found = parameter_splits(module, Layer("", style, Cut.of(size)), 2)
    return {name: tuple(splits[0].local_shape) for name, splits in found.items()}


def test_columns_split_outputs_and_rows_inputs() -> None:
    linear = nn.Linear(4, 6)
    assert shapes(linear, Style.COLUMN, 6) == {"weight": (3, 4), "bias": (3,)}
    assert shapes(linear, Style.ROW, 4) == {"weight": (6, 2)}


def test_embeddings_are_split_by_rows_or_by_heads() -> None:
    assert shapes(nn.Embedding(8, 6), Style.VOCABULARY, 8) == {"weight": (4, 6)}
    assert shapes(nn.Embedding(8, 6), Style.HEADS, 6) == {"weight": (8, 3)}


def test_attention_is_split_by_heads() -> None:
    attention = nn.MultiheadAttention(8, 4)
    expected = {"in_proj_weight": (12, 8), "in_proj_bias": (12,), "out_proj.weight": (8, 4)}
    assert shapes(attention, Style.HEADS, 4) == expected


def tied() -> tuple[nn.Module, TensorPlan]:
    module = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    module["two"].weight = module["one"].weight
    layer = Layer("one", Style.COLUMN, Cut.of(4), is_alone=True)
    return module, TensorPlan(2, [SplitBlock("one", (layer,))])


def test_a_parameter_that_another_module_has_too_is_a_contradiction() -> None:
    module, plan = tied()
    assert find_contradiction(module, plan) == (plan.blocks[0], "one.weight")
    drop_contradictions(module, plan)
    assert plan.blocks == []
    assert "one.weight is used elsewhere too" in plan.notes["one"]


def test_what_is_not_split_is_counted() -> None:
    assert describe_rest(nn.Linear(4, 4), TensorPlan(2)).startswith("100.0% of 20 elements")
    assert join_names("", "fc1") == "fc1"
    assert join_names("block", "fc1") == "block.fc1"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "cut", [Cut.of(10), Cut.of(12, unit=2), Cut.of(12, 2, 2), Cut((Section(8, 4), Section(4, 2)))]
)
def test_every_index_belongs_to_one_rank(cut: Cut, num_ranks: int) -> None:
    assert sorted(cut.order(num_ranks)) == list(range(cut.size))
    lengths = [cut.length(rank, num_ranks) for rank in range(num_ranks)]
    assert sum(lengths) == cut.size


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

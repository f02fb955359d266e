"""The plan as a table, and the names of splits."""

from __future__ import annotations

import pytest
from torch import nn

import shoal
from shoal.strategies.tensor import Style, draft
from shoal.strategies.tensor.plan.tensor_plan import parse_style, starred
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

"""Plans that users describe by patterns of names: what is split, and what is refused."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.strategies.tensor import draft
from shoal.strategies.tensor.plan.user_plan import plan_from_patterns
from strategies.tensor.plan.test_draft import Pair, styles
from strategies.tensor.tasks import GPT, Block, FeedForward


def test_a_pair_by_pattern() -> None:
    module = nn.Sequential(Pair(), Pair())
    plan = plan_from_patterns(module, 2, {"*.one": "column", "*.two": "row"})
    assert styles(plan) == {
        "0.one": "column", "0.two": "row", "1.one": "column", "1.two": "row",
    }  # fmt: skip


def test_a_column_without_a_row_is_joined_and_a_row_without_a_column_cut() -> None:
    assert styles(plan_from_patterns(Pair(), 2, {"one": "column"})) == {"one": "column alone"}
    assert styles(plan_from_patterns(Pair(), 2, {"two": "rowwise"})) == {"two": "row alone"}


def test_only_what_is_wished_for_is_split() -> None:
    plan = plan_from_patterns(
        GPT(), 2, {"blocks.0.mlp.*_proj": "replicated", "blocks.1.mlp.fc1": "column"}
    )
    assert styles(plan) == {"blocks.1.mlp.fc1": "column alone"}
    found = draft(GPT(), 2)
    patterns = {layer.name: layer.style.value for layer in found.layers}
    assert styles(plan_from_patterns(GPT(), 2, patterns)) == styles(found)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"nothing.*": "column"},
            "pattern 'nothing.*' fits no module; there are, for example, one",
        ),
        ({"one": "colum"}, "split by column, row, vocabulary, heads, replicated; got 'colum'"),
        ({"one": "vocabulary"}, "a plain nn.Embedding .* one is a Linear"),
        ({"one": "column", "o*": "row"}, "splits one by column and by row"),
        ({"one": "heads"}, "a plain nn.MultiheadAttention; one is a Linear"),
    ],
)
def test_wrong_plans_are_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_from_patterns(Pair(), 2, plan)


def test_a_pair_that_does_not_work_on_parts_is_refused() -> None:
    module = Pair(lambda x: F.layer_norm(x, x.shape[-1:]))
    with pytest.raises(ValueError, match=r"needs all features. Leave the row out"):
        plan_from_patterns(module, 2, {"one": "column", "two": "row"})
    with pytest.raises(ValueError, match="4 features between one and two do not divide by the 3"):
        plan_from_patterns(Pair(width=4), 3, {"one": "column", "two": "row"})


def test_half_of_a_tie_is_refused() -> None:
    with pytest.raises(ValueError, match="shared with a layer that the plan splits in another way"):
        plan_from_patterns(GPT(), 2, {"tokens": "vocabulary"})


def test_whoever_knows_is_trusted() -> None:
    class Masked(Pair):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * mask)

    plan = plan_from_patterns(Masked(), 2, {"one": "column", "two": "row"})
    assert styles(plan) == {"one": "column", "two": "row"}
    joined = Masked()
    joined.one = nn.Linear(4, 12)
    with pytest.raises(ValueError, match="where they are cut apart cannot be found out"):
        plan_from_patterns(joined, 2, {"one": "column", "two": "row"})


def test_a_refused_plan_changes_nothing() -> None:
    def attempt() -> None:
        module = Block(nn.Identity(), FeedForward(24, 6))
        with pytest.raises(ValueError, match="fits no module"):
            shoal.as_distributed(module, strategy="tensor", plan={"what": "row"})
        assert module.mlp.gate_proj.weight.shape == (6, 24)
        assert type(module.mlp.gate_proj) is nn.Linear

    shoal.run(attempt, 2, "memory")

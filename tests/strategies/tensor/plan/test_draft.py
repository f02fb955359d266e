"""Plans that are found: what is split, how, and what stays whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.strategies.tensor import TensorPlan, draft
from shoal.strategies.tensor.plan.user_plan import plan_from_patterns
from strategies.models import GPT as OtherGPT
from strategies.models import EncoderDecoder, OddMLP, has_transformers
from strategies.tensor.tasks import BUILDERS, GPT, FeedForward, NormedInside

needs_transformers = pytest.mark.skipif(not has_transformers(), reason="needs transformers")


def styles(plan: TensorPlan) -> dict[str, str]:
    return {
        layer.name: layer.style.value + (" alone" if layer.is_alone else "")
        for layer in plan.layers
    }


def test_what_is_found_in_a_gpt() -> None:
    module = GPT()
    found = styles(draft(module, 2))
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column") | {"o_proj": "row"}
    assert found == {
        **{f"blocks.0.attention.{name}": style for name, style in attention.items()},
        **dict.fromkeys(("blocks.0.mlp.gate_proj", "blocks.0.mlp.up_proj"), "column"),
        "blocks.0.mlp.down_proj": "row",
        "blocks.1.attention.c_attn": "column",
        "blocks.1.attention.c_proj": "row",
        "blocks.1.mlp.fc1": "column",
        "blocks.1.mlp.fc2": "row",
        "blocks.2.attention.c_attn": "column alone",  # takes widths from its input
        "blocks.2.attention.c_proj": "row alone",
        "blocks.2.mlp.fc1": "column alone",  # a norm in between
        "blocks.2.mlp.fc2": "row alone",
        "tokens": "vocabulary alone",
        "lm_head": "column alone",
    }


def test_partial_gradients_are_known() -> None:
    partial = {name for block in draft(GPT(), 2).blocks for name in block.partial}
    inside = {"blocks.0.attention.q_norm.weight", "blocks.0.attention.q_norm.bias"}
    assert partial == inside | {"blocks.0.mlp.slope"}  # and not the norm before a column


def test_sections_of_joined_projections() -> None:
    layers = {layer.name: layer for layer in draft(GPT(), 2).layers}
    assert layers["blocks.1.attention.c_attn"].cut.runs(1, 2) == ((12, 24), (36, 48), (60, 72))
    assert layers["blocks.1.mlp.fc1"].cut.runs(0, 2) == ((0, 7), (13, 20))


def test_names_do_not_matter_where_sizes_tell() -> None:
    assert styles(draft(OtherGPT(width=12), 2))["blocks.0.attention.mix"] == "column"


def test_a_pair_beside_other_layers_is_found_by_its_sizes() -> None:
    plan = draft(Pair(), 4)
    assert styles(plan) == {"one": "column", "two": "row"}
    assert [plan.layers[0].cut.length(rank, 4) for rank in range(4)] == [2, 2, 1, 1]


def test_whatever_is_not_recognised_stays_whole() -> None:
    assert not draft(OddMLP(), 2).layers
    assert not draft(nn.Conv2d(3, 3, 3), 2).layers
    assert not draft(nn.LSTM(4, 4), 2).layers


def test_too_few_heads_for_the_ranks() -> None:
    plan = draft(EncoderDecoder(), 3)
    assert not any("attn" in layer.name for layer in plan.layers)
    assert "2 heads for more ranks" in plan.notes["transformer.encoder.layers.0.self_attn"]


def test_one_rank_has_everything() -> None:
    assert not draft(GPT(), 1).layers


def test_a_head_without_a_layer_keeps_the_embedding_whole() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(12, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.tokens(tokens) @ self.tokens.weight.T

    assert not draft(Functional(), 2).layers


def test_a_weight_that_others_use_stays_whole() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
            self.other = nn.Linear(4, 6)
            self.other.weight = self.mlp[0].weight

    plan = draft(Shared(), 2)
    assert not plan.layers
    assert "is used elsewhere too" in plan.notes["mlp"]


def test_zeros_do_not_hide_what_is_between() -> None:
    """Weights that begin as zero would make every split look right."""
    module = NormedInside(4, 6)
    assert not module.fc2.weight.any()
    assert set(styles(draft(module, 2)).values()) == {"column alone", "row alone"}


class Reader(nn.Module):
    """Never calls its layers: takes their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, layer.weight, layer.bias)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return F.linear(mixed, self.c_proj.weight, self.c_proj.bias)


def test_weights_that_are_read_stay_whole() -> None:
    plan = draft(Reader(), 2)
    assert not plan.layers
    assert "reads its layers' weights" in plan.notes[""]
    with pytest.raises(ValueError, match="code of Reader reads weights of its layers"):
        plan_from_patterns(Reader(), 2, {"q_proj": "column"})


def test_trials_leave_buffers_alone() -> None:
    class Counting(FeedForward):
        def __init__(self) -> None:
            super().__init__(4, 6)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    module = Counting()
    assert len(draft(module, 2).layers) == 3
    assert module.calls == 0


def test_trials_leave_nothing_behind() -> None:
    module = GPT().train()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    before = torch.get_rng_state()
    draft(module, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert module.blocks[1].mlp.training
    assert module.blocks[1].attention.n_head == 6
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@needs_transformers
@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 16), ("gemma2", 16), ("gpt2", 10), ("bert", 12), ("vit", 12), ("t5", 38)],
)
def test_hugging_face(name: str, count: int) -> None:
    plan = draft(BUILDERS[name](), 2)
    assert len(plan.layers) == count
    alone = {layer.name.rpartition(".")[2] for layer in plan.layers if layer.is_alone}
    assert alone <= {"embed_tokens", "lm_head", "wte", "shared"}
    assert not plan.notes


@needs_transformers
def test_hugging_faces_own_plan_is_trusted_where_nothing_can_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("forward needs more")

    monkeypatch.setattr("shoal.strategies.tensor.plan.proposals.may_split", refuse)
    plan = draft(BUILDERS["qwen3"](), 2)
    assert styles(plan)["model.layers.0.self_attn.q_proj"] == "column"
    assert "model.layers.0.self_attn.q_norm.weight" in plan.blocks[0].partial
    alone = draft(BUILDERS["gpt2"](), 2)  # which has no plan
    assert styles(alone)["transformer.h.0.attn.c_attn"] == "column alone"


@needs_transformers
def test_their_plan_means_neighbours() -> None:
    """In GPT-NeoX queries, keys and values of a head lie together, not all queries first."""
    module = BUILDERS["neox"]()
    layers = {layer.name: layer for layer in draft(module, 2).layers}
    assert layers["gpt_neox.layers.0.attention.query_key_value"].cut.runs(0, 2) == ((0, 24),)


class Pair(nn.Module):
    """Names that nobody knows; what is between them may need all features."""

    def __init__(self, between: Any = torch.tanh, width: int = 6) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.between(self.one(x))))

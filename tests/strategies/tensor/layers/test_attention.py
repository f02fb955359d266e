"""Attention by heads gives what whole attention gives, whatever it is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies.tensor import parallelize
from strategies.models import random_numbers
from strategies.tensor.layers.comparison import assert_same, both, inputs, run

ATTENTION: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({"batch_first": True}, lambda m, x, y: m(x, x, x)),
    "without weights": ({"batch_first": True}, lambda m, x, y: m(x, x, x, need_weights=False)),
    "every head": ({"batch_first": True}, lambda m, x, y: m(x, x, x, average_attn_weights=False)),
    "sequence first": ({}, lambda m, x, y: m(x, y, y)),
    "other keys": ({"batch_first": True, "bias": False}, lambda m, x, y: m(x, y, y * 2)),
    "ends": ({"add_bias_kv": True, "add_zero_attn": True}, lambda m, x, y: m(x, x, x)),
    "unbatched": ({}, lambda m, x, y: m(x[0], x[1], x[1])),
    "causal": (
        {"batch_first": True},
        lambda m, x, y: m(
            x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=True,
            need_weights=False,
        ),
    ),
    "by head": (
        {"batch_first": True},
        lambda m, x, y: m(x, x, x, attn_mask=random_numbers(2, 4 * 6, 5, 5)),
    ),
    "padding": (
        {"batch_first": True, "add_bias_kv": True},
        lambda m, x, y: m(
            x, x, x, key_padding_mask=torch.arange(5)[None] > torch.tensor([[4], [2], [3], [1]]),
            attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(2),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_gives_what_torchs_gives(name: str) -> None:
    settings, call = ATTENTION[name]

    def check() -> None:
        x, y = inputs(4, 5, 12), inputs(4, 5, 12)
        pair = both(lambda: nn.MultiheadAttention(12, 6, **settings), lambda m: call(m, x, y))
        assert_same(pair)

    run(check)


def test_uneven_heads_and_other_widths() -> None:
    def check() -> None:
        x, k, v = inputs(5, 4, 10), inputs(3, 4, 6), inputs(3, 4, 2)
        pair = both(lambda: nn.MultiheadAttention(10, 5, kdim=6, vdim=2), lambda m: m(x, k, v))
        assert_same(pair)

    run(check)


def test_gradients_of_inputs_are_whole() -> None:
    def check() -> None:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4)).double()
        split = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4)).double()
        split.load_state_dict(whole.state_dict())
        parallelize(split, shoal.world().backend)
        x, y = inputs(2, 4), inputs(2, 4)
        whole(x).square().sum().backward()
        split(y).square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad)

    run(check)

"""Embeddings of which each rank has some rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.strategies.tensor import parallelize
from strategies.models import random_tokens
from strategies.tensor.layers.comparison import assert_same, both, run


class Tokens(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4, **settings)
        self.lm_head = nn.Linear(4, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embedding(tokens))


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 7}, {"padding_idx": -1}])
def test_vocabulary(settings: dict[str, Any]) -> None:
    def check() -> None:
        tokens = random_tokens(1, 11, 6, 9)
        assert_same(both(lambda: Tokens(**settings), lambda m: (m(tokens),)))

    run(check)
    run(check, ranks=4)


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    def check() -> None:
        module = Tokens()
        parallelize(module, shoal.world().backend)
        with pytest.raises(IndexError, match="from 0 to 10; got some from 3 to 11"):
            module(torch.tensor([3, 11]))

    run(check)

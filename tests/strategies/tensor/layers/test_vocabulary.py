"""Embeddings and cross entropy of a vocabulary that is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.strategies.tensor import parallelize, vocabulary_cross_entropy
from strategies.models import random_numbers, random_tokens
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cross_entropy_of_split_logits(dtype: torch.dtype) -> None:
    def check() -> None:
        group = shoal.world().backend
        logits = (8 * random_numbers(1, 3, 5, 11)).to(dtype).requires_grad_()
        targets = random_tokens(1, 11, 3, 5)
        targets[0, :2] = -100
        expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
        (wanted,) = torch.autograd.grad(expected, logits)
        own = logits.detach().tensor_split(3, -1)[group.rank].contiguous().requires_grad_()
        loss = vocabulary_cross_entropy(own, targets, group, 11)
        loss.backward()
        tolerance = 1e-12 if dtype is torch.float64 else 1e-2
        torch.testing.assert_close(loss.double(), expected, rtol=0, atol=tolerance)
        part = wanted.tensor_split(3, -1)[group.rank]
        torch.testing.assert_close(own.grad, part, rtol=0, atol=tolerance)
        with pytest.raises(ValueError, match=r"of 3 has . of 12 classes"):
            vocabulary_cross_entropy(own[..., :1], targets, group, 12)

    run(check)


def test_training_with_split_logits() -> None:
    def losses(split: bool) -> list[float]:
        torch.manual_seed(0)
        module = Tokens().double()
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=1.0)
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy="tensor", split_logits=split
        )
        found = []
        for step in range(3):
            tokens = random_tokens(step, 11, 6, 9)
            found.append(float(model.train_step(tokens, tokens.roll(1), model.cross_entropy)))
            optimizer.step()
            optimizer.zero_grad()
        assert model(torch.tensor([1])).shape[-1] == (
            len(torch.arange(11).tensor_split(3)[shoal.world().rank]) if split else 11
        )
        return found

    split, whole = run(losses, True), run(losses, False)
    assert split[0] == split[1] == split[2]
    assert split[0] == pytest.approx(whole[0], abs=1e-12)

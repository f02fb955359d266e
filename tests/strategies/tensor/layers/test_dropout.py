"""Dropout under tensor parallelism: its masks are those of one process."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.strategies.tensor import parallelize
from strategies.models import (
    Batch,
    Task,
    causal_text,
    has_transformers,
    in_float64,
    moved,
    own_loss,
    random_numbers,
)
from strategies.tensor.tasks import BUILDERS, Encoder, FeedForward, padded, padded_loss


class Dropping(nn.Module):
    """Drops before, in and after what is split, with a module and with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 12)
        self.attention, self.mlp = _Attention(), _FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.entry(x), 0.2, self.training)
        x = x + self.attention(x)
        return x + self.mlp(x)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))
        self.num_heads, self.dropout = 6, 0.3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return F.dropout(self.o_proj(mixed.transpose(1, 2).flatten(2)), 0.4, self.training)


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(12, 13), nn.Linear(13, 12), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(torch.tanh(self.fc1(x)))))


class Literal(nn.Module):
    """A stack whose rates of dropout stand in the code only, in what is split and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_LiteralBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _LiteralBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), _LiteralFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.norm(x)), 0.2, self.training)


class _LiteralFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.fc1(x)), 0.3, self.training)
        return self.fc2(torch.dropout(hidden, 0.1, self.training))


class _Scaled(nn.Module):
    """Wants two tensors, so that it cannot be tried, and has names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.two(F.dropout(self.one(x), 0.3, self.training)) * scale


class Untried(nn.Module):
    """A block for which a user's plan is trusted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.mean())


def numbers(step: int, items: int) -> Batch:
    return {"x": random_numbers(step, items, 5, 6)}


def square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def dropping(name: str) -> Any:
    """A Hugging Face model whose rates of dropout are not zero."""

    def build() -> nn.Module:
        module = BUILDERS[name]()
        for part in module.modules():
            for key in ("attention_dropout", "p", "dropout"):
                if type(vars(part).get(key)) is float:
                    setattr(part, key, 0.3)
        return module

    return build


TASKS = {
    "own": Task(in_float64(Dropping), numbers, square),
    "literal": Task(in_float64(Literal), numbers, square),
    "untried": Task(in_float64(Untried), numbers, square),
    "encoder": Task(in_float64(functools.partial(Encoder, 0.3)), padded, padded_loss),
    **{
        name: Task(in_float64(dropping(name)), causal_text, own_loss, tolerance=1e-5)
        for name in ("gpt2", "llama", "t5")
    },
}
PLANS = {"untried": {"inner.one": "column", "inner.two": "row"}}
_NEEDED = pytest.mark.skipif(not has_transformers(), reason="needs transformers")


def outcome(task: Task, seed: int, model: nn.Module, device: str) -> list[Tensor]:
    """Two losses: generators must be alike after the first forward too."""
    torch.manual_seed(seed)
    batches = [moved(task.batch(step, 3), device) for step in range(2)]
    return [task.loss(model, batch).detach() for batch in batches]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "own", "literal", "untried", "encoder", pytest.param("gpt2", marks=_NEEDED),
        pytest.param("llama", marks=[_NEEDED, pytest.mark.full]),
        pytest.param("t5", marks=[_NEEDED, pytest.mark.full]),
    ],
)  # fmt: skip
def test_masks_are_those_of_one_process(name: str, sequence_parallel: bool) -> None:
    if name in ("own", "untried") and sequence_parallel:
        pytest.skip("is no stack")
    check_masks(name, sequence_parallel, "cpu")


def check_masks(name: str, sequence_parallel: bool, device: str) -> None:
    def on_ranks() -> list[Tensor]:
        torch.manual_seed(0)
        module = TASKS[name].build().to(device)
        options = {"strategy": "tensor", "sequence_parallel": sequence_parallel}
        model = shoal.as_distributed(module, plan=PLANS.get(name), **options)
        # Seeds may differ: the first rank's counts.
        return outcome(TASKS[name], 5 + shoal.world().rank, model, device)

    torch.manual_seed(0)
    module = TASKS[name].build().to(device)
    expected = outcome(TASKS[name], 5, module, device)
    assert not torch.equal(expected[0], outcome(TASKS[name], 6, module, device)[0])
    for found in shoal.run(on_ranks, 3, "memory", timeout=40):
        for loss, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(loss, wanted, rtol=0, atol=TASKS[name].tolerance)


def test_what_is_drawn_after_a_forward_is_the_same_too() -> None:
    """Ranks that sample the next token must go on with the same one."""

    def draw() -> float:
        model = shoal.as_distributed(Dropping(), strategy="tensor").eval()
        torch.manual_seed(shoal.world().rank)
        with torch.no_grad():
            model(torch.zeros(2, 3, 6))
        return torch.rand(()).item()

    torch.manual_seed(0)
    assert shoal.run(draw, 3, "memory") == [torch.rand(()).item()] * 3


def test_only_what_drops_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of torch costs something in every function that is called while it is on."""
    watched: list[str] = []

    def note(part: nn.Module, _: Any) -> None:
        watched.append(type(part).__name__)

    def wrap() -> None:
        module = nn.Sequential(_LiteralFeedForward(), FeedForward(6, 8))
        shoal.as_distributed(module, strategy="tensor")

    monkeypatch.setattr(sys.modules[parallelize.__module__], "during", note)
    shoal.run(wrap, 2, "memory")
    assert watched == ["_LiteralFeedForward"] * 2

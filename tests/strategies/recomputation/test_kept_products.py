"""What "selective" keeps of a block: products with weights, and fused attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.strategies.recomputation.kept_products import _ATTENTION, _is_kept
from strategies.recomputation.recomputed import assert_equal_states, seed_all

HEADS, WIDTH = 2, 16
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Mixing(nn.Module):
    """Attention of one kind or another, and dropout behind it, which must draw the same again."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.norm, self.drop = attend, nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0)
        mixed = self.attend(*parts.transpose(-3, -2).unbind(0))
        return x + self.drop(self.out(mixed.transpose(-3, -2).flatten(-2)))


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Counted(TorchDispatchMode):
    """How often an operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func is FUSED
        return func(*args, **(kwargs or {}))


def gradients(attend: Callable[..., Tensor], activations: Any) -> tuple[dict[str, Tensor], int]:
    seed_all(0)
    module = nn.Sequential(*(Mixing(attend) for _ in range(3)))
    model = shoal.as_distributed(module, strategy="zero3", activations=activations)
    seed_all(1)
    output = model(torch.randn(2, 5, WIDTH))
    with Counted() as counted:
        output.square().mean().backward()
    return dict(model.full_gradients()), counted.times


@pytest.mark.parametrize("attend", [fused, masked, with_dropout, unfused])
def test_attention_is_not_computed_again_where_it_is_fused(attend: Callable[..., Tensor]) -> None:
    runs = {
        policy: shoal.run(gradients, 2, "memory", args=(attend, policy))
        for policy in (None, "selective", "full")
    }
    assert_equal_states(runs["selective"], runs[None])
    assert_equal_states(runs["full"], runs[None])
    is_fused = attend in (fused, masked)
    assert [again for _, again in runs["full"]] == [3 * is_fused] * 2
    assert [again for _, again in runs["selective"]] == [0, 0]


def test_where_dropout_is_said() -> None:
    for function, position in _ATTENTION.items():
        names = [argument.name for argument in function._schema.arguments]
        assert names[position] == "dropout_p", function
        before = [None] * position
        assert _is_kept(function, before)
        assert _is_kept(function, [*before, 0.0])
        assert not _is_kept(function, [*before, 0.1])


class Overwritten(nn.Module):
    """Products that are written to without torch's counting it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gru = how, nn.GRU(4, 4, 2, batch_first=True)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gru":  # writes to its products through `unsafe_chunk`
            return self.gru(x)[0]
        y = self.up(x)
        if self.how == "data":
            y.data.mul_(2)
        else:
            torch.mul(y.data, 2, out=y.data)
        return self.down(torch.sin(y))


def gradients_of_overwritten(how: str, activations: Any) -> list[Tensor]:
    seed_all(0)
    module = nn.Sequential(*(Overwritten(how) for _ in range(2)))
    model = shoal.as_distributed(module, strategy="ddp", activations=activations, check_every=0)
    model(torch.randn(2, 5, 4)).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("how", ["gru", "data", "out"])
def test_products_that_are_overwritten_are_computed_again(how: str) -> None:
    plain, selective = (
        shoal.run(gradients_of_overwritten, 1, "memory", args=(how, each))[0]
        for each in (None, "selective")
    )
    assert len(plain) == len(selective) > 0
    assert all(map(torch.equal, plain, selective))


class Unsteady(nn.Module):
    """Uses its layers in another order when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 8)]), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return sum(layer(x).tanh().sum() for layer in list(self.layers)[:: (-1) ** self.calls])


def differ() -> str:
    model = shoal.as_distributed(nn.Sequential(Unsteady()), activations="selective")
    try:
        model(torch.ones(2, 4)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_other_products_in_the_second_call_are_an_error() -> None:
    (text,) = shoal.run(differ, 1, "memory")
    assert "it must do the same matrix products in the same order" in text

"""Split layers give what whole ones give, whatever they are called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.strategies.tensor import parallelize, vocabulary_cross_entropy
from strategies.models import random_numbers, random_tokens

RANKS = 3


def run(fn: Any, *args: Any, ranks: int = RANKS) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def both(make: Any, call: Any, plan: Any = None) -> tuple[Any, Any]:
    """What a whole module and its split copy give: results, and whole gradients."""
    torch.manual_seed(0)
    whole, split = make().double(), make().double()
    split.load_state_dict(whole.state_dict())
    parts = parallelize(split, shoal.world().backend, plan)
    results = []
    for module in (whole, split):
        outputs = call(module)
        sum((out * (1 + torch.arange(out.numel()).view(out.shape) % 5)).sum() for out in outputs
            if out is not None).backward()  # fmt: skip
        results.append([None if out is None else out.detach() for out in outputs])
    found = {
        name: parts.join(name, gradient) if name in parts.splits and gradient is not None
        else gradient
        for name, gradient in gradients(split).items()
    }  # fmt: skip
    return (results[0], gradients(whole)), (results[1], found)


def assert_same(pair: tuple[Any, Any]) -> None:
    (outputs, wanted), (found, gradients) = pair
    for one, other in zip(outputs, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    for name, gradient in wanted.items():
        if gradient is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-11, msg=name)


def inputs(*shape: int) -> Tensor:
    return random_numbers(1, *shape).requires_grad_()


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_paths_of_evaluation_are_left() -> None:
    def check() -> None:
        def make() -> nn.Module:
            layer = nn.TransformerEncoderLayer(12, 6, 7, batch_first=True)
            return nn.TransformerEncoder(layer, 2)

        torch.manual_seed(0)
        whole, split = make().eval(), make().eval()
        split.load_state_dict(whole.state_dict())
        parallelize(split, shoal.world().backend)
        x = random_numbers(1, 2, 5, 12, dtype=torch.float32)
        padding = torch.arange(5)[None] >= torch.tensor([[5], [3]])
        with torch.no_grad():
            for options in ({}, {"src_key_padding_mask": padding}):
                one, other = whole(x, **options), split(x, **options)
                kept = ~padding if options else torch.ones_like(padding)
                torch.testing.assert_close(other[kept], one[kept], rtol=0, atol=1e-5)

    run(check)


def test_layers_keep_their_identity() -> None:
    def check() -> None:
        module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        before = [id(parameter) for parameter in module.parameters()]
        names = list(module.state_dict())
        parallelize(module, shoal.world().backend)
        assert [id(parameter) for parameter in module.parameters()] == before
        assert list(module.state_dict()) == names
        assert all(isinstance(module[index], nn.Linear) for index in (0, 2))
        assert module[0].out_features == module[2].in_features == 2
        assert "ColumnParallelLinear(in_features=4, out_features=2" in repr(module)

    run(check)

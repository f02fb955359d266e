"""What blocks do with parts of their features in calls that differ from the first one tried.

Each module here was once split in a way that gave other numbers than one process, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.strategies.tensor import draft
from shoal.strategies.tensor.plan.user_plan import plan_from_patterns

WIDTH, HIDDEN, LENGTH, ITEMS = 8, 12, 5, 3


class Pair(nn.Module):
    """A column and a row, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)


class OverDimensionOne(Pair):
    """Over positions if there are any, over features if not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).softmax(1))


class InTraining(Pair):
    """Looks at all features only where it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(F.normalize(hidden, dim=-1) if self.training else hidden)


class Switched(Pair):
    """Looks at all features if it is told to."""

    def forward(self, x: Tensor, is_normal: bool = False) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(F.normalize(hidden, dim=-1) if is_normal else hidden)


class SwitchedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Switched()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, is_normal=True)


class Penalized(Pair):
    """Leaves something of its activations behind, for the loss."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        self.penalty = hidden.pow(2).mean()
        return self.fc2(hidden)


class WithPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Penalized()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.penalty


class WithFunction(Pair):
    """Blocks that look alike but for a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.function(self.fc1(x)))


def functions() -> nn.Module:
    return nn.Sequential(WithFunction(torch.tanh), WithFunction(lambda x: x.softmax(-1)))


class OneByOne(nn.Module):
    """Calls the layers of a sequence itself, and uses what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x)
            total = total + x.norm()
        return self.layers(x) + total


class OwnSequence(nn.Sequential):
    """A sequence with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](F.normalize(self[0](x), dim=-1))


def own_sequence() -> nn.Module:
    return OwnSequence(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


class PerHead(nn.Module):
    """Attention with a feed-forward block for each head inside: that one must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.mix = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        split = [f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(self.mix(split[0]), *split[1:])
        return self.o(mixed.transpose(1, 2).flatten(2))


class Sizes(nn.Module):
    """Asks its layers how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., 0].abs().long().clamp(max=self.tokens.num_embeddings - 1)
        return self.head(self.tokens(tokens)).view(-1, self.head.out_features)


class Regularized(nn.Module):
    """Uses the weight of an embedding without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., 0].abs().long().clamp(max=8)
        return self.head(self.tokens(tokens)) + self.tokens.weight.norm()


class Caching(nn.Module):
    """Keeps a table from its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.table, self.seen = 4, None, []
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[-2], dtype=x.dtype)[:, None]
        self.seen.append(x.shape)
        heads = [
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) * self.table
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return self.o_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


SEQUENCES = (ITEMS, LENGTH, WIDTH)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "features in dimension 1": (OverDimensionOne, (ITEMS, WIDTH)),
    "in training only": (InTraining, SEQUENCES),
    "with a switch": (SwitchedOn, SEQUENCES),
    "left behind": (WithPenalty, SEQUENCES),
    "with a function": (functions, SEQUENCES),
    "layers called one by one": (OneByOne, SEQUENCES),
    "a sequence of its own": (own_sequence, SEQUENCES),
    "a block in a region": (PerHead, SEQUENCES),
    "sizes": (Sizes, SEQUENCES),
    "a weight that is read": (Regularized, SEQUENCES),
    "a cache": (Caching, SEQUENCES),
}


def trained(build: Callable[[], nn.Module], shape: tuple[int, ...], is_split: bool) -> Any:
    """Outputs and gradients of one step in training."""
    torch.manual_seed(0)
    module: Any = build().double()
    inputs = torch.randn(shape, dtype=torch.float64)
    model = shoal.as_distributed(module, strategy="tensor") if is_split else module
    outputs = model(inputs)
    (outputs * torch.linspace(-1, 2, outputs.numel()).view(outputs.shape)).sum().backward()
    if not is_split:
        return outputs.detach(), {name: p.grad for name, p in module.named_parameters()}
    return outputs.detach(), dict(model.full_gradients())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, ranks: int) -> None:
    outputs, gradients = trained(*CASES[name], is_split=False)
    results = shoal.run(trained, ranks, "memory", args=(*CASES[name], True), timeout=40)
    for found, own in results:
        torch.testing.assert_close(found, outputs)
        torch.testing.assert_close(own, gradients)


def test_a_region_is_still_found_where_it_may_be() -> None:
    plan = draft(PerHead(), 2)
    assert [layer.name for layer in plan.layers] == ["q", "k", "v", "o"]
    assert plan.blocks[0].inside == ("mix", "mix.0", "mix.1", "mix.2")


def test_a_plan_cannot_split_inside_of_a_region() -> None:
    patterns = dict.fromkeys(("q", "k", "v", "mix.0"), "column") | {"o": "row", "mix.2": "row"}
    with pytest.raises(ValueError, match=r"mix\.0 cannot be split: it is called between"):
        plan_from_patterns(PerHead(), 2, patterns)


def test_trials_leave_caches_alone() -> None:
    module = Caching()
    draft(module, 2)
    assert module.table is None
    assert module.seen == []
    assert module.training


class Folded(nn.Module):
    """Attention whose heads are folded into the batch, with dropout that cannot be cut there."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.drop = 4, nn.Dropout(0.5)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, 2).transpose(1, 2).reshape(-1, length, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = self.drop((q @ k.mT).softmax(-1)) @ v
        return self.o_proj(mixed.view(batch, -1, length, 2).transpose(1, 2).flatten(2))


class Noisy(Pair):
    """Draws random numbers that are no dropout."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden + torch.randn_like(hidden) if self.training else hidden)


def other_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.AlphaDropout(0.5), nn.Linear(HIDDEN, WIDTH))


@pytest.mark.parametrize("build", [Folded, Noisy, other_dropout])
def test_random_numbers_are_those_of_one_process(build: Callable[[], nn.Module]) -> None:
    outputs, gradients = trained(build, SEQUENCES, is_split=False)
    for found, own in shoal.run(trained, 3, "memory", args=(build, SEQUENCES, True), timeout=40):
        torch.testing.assert_close(found, outputs)
        torch.testing.assert_close(own, gradients)


class Annealed(Pair):
    """Begins to look at all features in the course of training."""

    tau = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden + self.tau * F.normalize(hidden, dim=-1))


@pytest.mark.parametrize(("tau", "plan"), [(1.0, None), (0.0, {"fc1": "column"})])
def test_what_changes_later_is_right_if_the_plan_is_made_for_it(tau: float, plan: Any) -> None:
    """What the documentation says to do."""

    def outcome(is_split: bool) -> Tensor:
        torch.manual_seed(0)
        module: Any = Annealed().double()
        module.tau = tau
        options = {"strategy": "tensor", "plan": plan}
        model = shoal.as_distributed(module, **options) if is_split else module
        module.tau = 0.5
        return model(torch.ones(ITEMS, WIDTH, dtype=torch.float64)).detach()

    for found in shoal.run(outcome, 2, "memory", args=(True,)):
        torch.testing.assert_close(found, outcome(is_split=False))

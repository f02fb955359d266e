"""Graphs that are not one forward and one backward, and the user's hooks in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from strategies.loops import (
    BuildModule,
    State,
    assert_same,
    assert_same_gradients,
    data,
    distinct,
    full_gradients,
    gradients_of,
    local,
    momentum,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import OddMLP, Twice

# Graphs that are not one forward and one backward ---------------------------------------------


def compare_gradients(
    strategy: str,
    loss_of: Callable[[Any, Tensor], Tensor],
    make: BuildModule = OddMLP,
    **options: Any,
) -> None:
    """``loss_of`` makes a mean over the items and may call backward itself."""

    def on_rank() -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = wrapped(strategy, make, **options)
        x, _ = local(0)
        loss_of(model, x).backward()
        first = full_gradients(model)
        optimizer.zero_grad()
        loss_of(model, x).backward()  # and nothing is left over from the first time
        return first, full_gradients(model)

    model = seeded(make)
    loss_of(model, data(0)[0]).backward()
    for first, second in run(on_rank):
        assert_same_gradients(first, gradients_of(model))
        assert_same_gradients(second, gradients_of(model))


@distinct
def test_learning_to_learn(strategy: str) -> None:
    """Each item is a task: the model with parameters that made a step on it (MAML)."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        parameters = dict(model.named_parameters())
        losses = []
        for item in x.split(1):
            before = torch.func.functional_call(model, parameters, (item,)).square().mean()
            gradients = torch.autograd.grad(before, list(parameters.values()), create_graph=True)
            stepped = {
                name: parameter - 0.1 * gradient
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
            }
            losses.append(torch.func.functional_call(model, stepped, (item + 1,)).square().mean())
        return torch.stack(losses).mean()

    compare_gradients(strategy, loss_of)


def several_forwards(model: Any, x: Tensor) -> Tensor:
    first, second = model(x), model(x * 2)
    return (first * second + model(x - 1)).square().mean()


def several_backwards(model: Any, x: Tensor) -> Tensor:
    first, second = model(x).square().mean(), model(x * 2).square().mean()
    first.backward()
    return second


def backwards_in_the_other_order(model: Any, x: Tensor) -> Tensor:
    first, second = model(x).square().mean(), model(x * 2).square().mean()
    second.backward()
    return first


def retained_graph(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return loss


def forward_without_backward(model: Any, x: Tensor) -> Tensor:
    model(x + 3)
    return model(x).square().mean()


def forward_of_the_output(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    return model(torch.cat([out, out, x[:, :1]], 1)).square().mean()


def gradient_of_the_input(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    return model(x.detach() + gradient).square().mean()


def detached_part(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    return (out * out.detach()).mean()


def under_no_grad_between(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    with torch.no_grad():
        target = model(x + 1)
    return F.mse_loss(out, target)


GRAPHS = [
    several_forwards,
    several_backwards,
    backwards_in_the_other_order,
    retained_graph,
    forward_without_backward,
    forward_of_the_output,
    gradient_of_the_input,
    detached_part,
    under_no_grad_between,
]


@distinct
@pytest.mark.parametrize("loss_of", GRAPHS, ids=lambda f: f.__name__)
def test_graphs_of_many_kinds(strategy: str, loss_of: Callable[[Any, Tensor], Tensor]) -> None:
    compare_gradients(strategy, loss_of)


@distinct
def test_a_module_used_twice_in_one_forward(strategy: str) -> None:
    compare_gradients(strategy, lambda model, x: model(x).square().mean(), Twice)


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


@distinct
def test_a_gradient_of_a_gradient(strategy: str) -> None:
    compare_gradients(strategy, gradient_penalty)


class Recomputing(nn.Module):
    """Drops the activations of two of its three parts, and computes them again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:
            x = x.requires_grad_()
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x


class RecomputingEverything(Recomputing):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return x


@distinct
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [Recomputing, RecomputingEverything])
def test_activation_checkpointing(
    strategy: str, use_reentrant: bool, kind: type[Recomputing]
) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        return model(x.clone()).square().mean()

    compare_gradients(strategy, loss_of, lambda: kind(use_reentrant))


class RecomputingTwice(nn.Module):
    """A block's gradients arrive twice in one backward, and before those of its neighbours."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = (nn.Linear(7, 7) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=self.use_reentrant))
        return self.last(x)


@distinct
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("min_group_bytes", [0, 1 << 20])
def test_activation_checkpointing_of_a_block_used_again(
    strategy: str, use_reentrant: bool, min_group_bytes: int
) -> None:
    compare_gradients(
        strategy,
        lambda model, x: model(x).square().mean(),
        lambda: RecomputingTwice(use_reentrant),
        min_group_bytes=min_group_bytes,
    )


class RecomputingHalf(nn.Module):
    """What is computed again begins in a group that is there already, and ends in another."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.second, self.unused = (nn.Linear(7, 7) for _ in range(4))
        self.use_reentrant = use_reentrant

    def both(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            checkpoint(self.both, x.requires_grad_(), use_reentrant=self.use_reentrant)
        )


@distinct
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_half_a_group(strategy: str, use_reentrant: bool) -> None:
    compare_gradients(
        strategy,
        lambda model, x: model(x.clone()).square().mean(),
        lambda: RecomputingHalf(use_reentrant),
        min_group_bytes=700,
    )


class ReturnsParts(nn.Module):
    """Several outputs, of which the loss uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(7, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.body(x))
        return {"both": (self.left(x), [self.right(x)]), "none": None}


@distinct
def test_outputs_that_the_loss_does_not_use(strategy: str) -> None:
    compare_gradients(strategy, lambda model, x: model(x)["both"][0].square().mean(), ReturnsParts)
    compare_gradients(
        strategy, lambda model, x: model(x)["both"][1][0].square().mean(), ReturnsParts
    )


@distinct
def test_two_models_in_one_world(strategy: str) -> None:
    """A generator and a discriminator, stepped in turns."""

    def losses(generator: Any, discriminator: Any, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        fake = generator(x)
        yield F.mse_loss(discriminator(fake.detach().repeat(1, 2)[:, :5]), y)
        yield -discriminator(fake.repeat(1, 2)[:, :5]).square().mean()

    def train(is_wrapped: bool) -> tuple[State, State]:
        torch.manual_seed(0)
        models: Any = [OddMLP().double(), OddMLP((5, 11, 3)).double()]
        optimizers: Any = [momentum(model) for model in models]
        if is_wrapped:
            pairs = [
                shoal.as_distributed(*pair, strategy=strategy, min_group_bytes=300)
                for pair in zip(models, optimizers, strict=True)
            ]
            models, optimizers = zip(*pairs, strict=True)
        for step in range(4):
            x, y = local(step) if is_wrapped else data(step)
            for which, loss in enumerate(losses(*models, x, y)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                optimizers[1 - which].step()
        return whole_state(models[0]), whole_state(models[1])

    expected = train(False)
    for found in run(train, True):
        for state, reference in zip(found, expected, strict=True):
            assert_same(state, reference)


# Hooks of the user's --------------------------------------------------------------------------


def count_hooks(strategy: str | None, when: str) -> tuple[list[str], Any]:
    model: Any = seeded()
    calls: list[str] = []

    def install(model: Any) -> None:
        model.layers[1].register_forward_hook(lambda *_: calls.append("forward"))
        model.layers[1].register_full_backward_hook(lambda *_: calls.append("backward"))
        model.layers[1].weight.register_hook(lambda g: calls.append(f"{tuple(g.shape)}") or 2 * g)
        model.layers[0].bias.register_hook(lambda g: 0 * g)

    if when == "before":
        install(model)
    if strategy is not None:
        model = shoal.as_distributed(model, strategy=strategy, min_group_bytes=300)
    if when == "after":
        install(model)
    x, y = data(0) if strategy is None else local(0)
    F.mse_loss(model(x), y).backward()
    return calls, gradients_of(model) if strategy is None else full_gradients(model)


@distinct
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_s(strategy: str, when: str) -> None:
    expected_calls, expected = count_hooks(None, when)
    for calls, gradients in run(count_hooks, strategy, when):
        assert sorted(calls) == sorted(expected_calls)
        assert_same_gradients(gradients, expected)

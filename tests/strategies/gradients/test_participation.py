"""Parameters that take part sometimes, on some ranks, or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from strategies.loops import (
    RANKS,
    State,
    assert_same,
    assert_same_gradients,
    data,
    distinct,
    each,
    full_gradients,
    gradients_of,
    local,
    momentum,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import Experts, Unused


def freeze_and_unfreeze(strategy: str | None) -> tuple[State, list[bool]]:
    model: Any = seeded()
    model.layers[0].requires_grad_(False)
    optimizer: Any = momentum(model)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=300
        )
    has_gradient = []
    for step in range(9):
        if step == 3:
            model.layers[0].requires_grad_(True)
        if step == 6:
            model.layers[1].weight.requires_grad_(False)
        one_step(model, optimizer, data(step) if strategy is None else local(step))
        has_gradient.append([p.grad is not None for p in model.parameters()])
    return whole_state(model), has_gradient


@each
def test_frozen_then_unfrozen_then_frozen(strategy: str) -> None:
    expected, has_gradient = freeze_and_unfreeze(None)
    for state, found in run(freeze_and_unfreeze, strategy):
        assert_same(state, expected)
        assert found == has_gradient


def use_some(strategy: str | None) -> tuple[State, list[Any]]:
    model: Any = seeded(Unused)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3, weight_decay=0.5)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=1 << 20
        )
    seen = []
    for step, use in enumerate((False, True, True, False, True)):
        optimizer.zero_grad()
        x, y = data(step) if strategy is None else local(step)
        F.mse_loss(model(x, use), y).backward()
        seen.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    return whole_state(model), seen


@each
def test_unused_parameters_have_no_gradient_and_are_not_stepped(strategy: str) -> None:
    expected, expected_seen = use_some(None)
    assert torch.equal(expected["never.weight"], seeded(Unused).never.weight)
    for state, seen in run(use_some, strategy):
        assert_same(state, expected)
        assert seen == expected_seen


def use_different_experts(strategy: str | None, num_ranks: int) -> tuple[State, list[Any]]:
    """Rank r uses the experts r and r + 1; the order of use differs as well."""
    model: Any = seeded(Experts)
    optimizer: Any = momentum(model)
    ranks: Sequence[int] = range(num_ranks)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=100
        )
        ranks = [shoal.world().rank]
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = data(10 * step + rank, items=4, inputs=5, outputs=2)
            route = torch.tensor([rank, rank + step, rank, rank]) % 3
            loss = F.mse_loss(model(x, route), y)
            (loss if strategy else loss / num_ranks).backward()
        seen.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    return whole_state(model), seen


@each
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_use_different_experts_do_not_hang(strategy: str, ranks: int) -> None:
    expected, expected_seen = use_different_experts(None, ranks)
    for state, seen in run(use_different_experts, strategy, ranks, ranks=ranks):
        assert_same(state, expected)
        assert seen == expected_seen


class Backwards(nn.Module):
    """Uses its layers in an order that the input chooses, some of them several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


ORDERS = [
    [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 5, 0, 5, 0]],
    [[3], [1, 2, 1, 2, 1, 2, 4], [5, 0]],
    [[0, 0, 0], [2, 1], [4, 4, 5, 1, 0, 2, 3, 5]],
]


def use_in_any_order(strategy: str | None) -> State:
    model: Any = seeded(Backwards)
    optimizer: Any = momentum(model)
    ranks: Sequence[int] = range(RANKS)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=0
        )
        ranks = [shoal.world().rank]
    for step in range(6):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = data(10 * step + rank, items=2, inputs=5, outputs=5)
            loss = F.mse_loss(model(x, ORDERS[step % 3][rank]), y)
            (loss if strategy else loss / RANKS).backward()
        optimizer.step()
    return whole_state(model)


@each
def test_ranks_that_use_layers_in_different_orders(strategy: str) -> None:
    expected = use_in_any_order(None)
    for state in run(use_in_any_order, strategy):
        assert_same(state, expected)


def one_rank_uses_nothing(strategy: str) -> dict[str, Any]:
    """Rank 1's loss does not depend on the model; it still takes part."""
    model, _ = wrapped(strategy)
    x, y = local(0)
    loss = F.mse_loss(model(x), y)
    if shoal.world().rank == 1:
        loss = loss * 0
    loss.backward()
    return full_gradients(model)


@distinct
def test_a_rank_with_a_loss_of_zero(strategy: str) -> None:
    model = seeded()
    for rank in (0, 2):
        x, y = (tensor.chunk(RANKS)[rank] for tensor in data(0))
        (F.mse_loss(model(x), y) / RANKS).backward()
    for gradients in run(one_rank_uses_nothing, strategy):
        assert_same_gradients(gradients, gradients_of(model))


@each
def test_gradients_add_up_where_only_some_ranks_used_a_parameter(strategy: str) -> None:
    """Ranks that had not used it forgot its averaged gradient in the next backward."""

    def add_up() -> dict[str, Any]:
        model, _ = wrapped(strategy, Unused)
        for step, users in enumerate(((0,), (), (1,))):
            x, y = local(step)
            F.mse_loss(model(x, shoal.world().rank in users), y).backward()
        return full_gradients(model)

    model = seeded(Unused)
    for step, users in enumerate(((0,), (), (1,))):
        parts = [tensor.chunk(RANKS) for tensor in data(step)]
        for rank, (x, y) in enumerate(zip(*parts, strict=True)):
            (F.mse_loss(model(x, rank in users), y) / RANKS).backward()
    for gradients in run(add_up):
        assert_same_gradients(gradients, gradients_of(model))

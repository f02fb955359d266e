"""What a PyTorch user expects of a training loop: steps, and when gradients are averaged."""

from __future__ import annotations

import contextlib
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
    num_reductions,
    one_process,
    one_process_gradients,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import random_numbers

# The plain loop and train_step ----------------------------------------------------------------


def loop(strategy: str) -> State:
    model, optimizer = wrapped(strategy)
    for step in range(5):
        one_step(model, optimizer, local(step))
    return model.state_dict()


@each
def test_the_plain_loop(strategy: str) -> None:
    for state in run(loop, strategy):
        assert_same(state, one_process(range(5)))


def loop_of_train_step(strategy: str, sizes: Sequence[int]) -> tuple[State, list[Tensor]]:
    model, optimizer = wrapped(strategy)
    rank = shoal.world().rank
    losses = []
    for step in range(5):
        x, y = (tensor.split(list(sizes))[rank] for tensor in data(step))
        optimizer.zero_grad()
        losses.append(model.train_step(x, y, F.mse_loss))
        optimizer.step()
    assert not any(loss.requires_grad for loss in losses)
    return model.state_dict(), losses


@each
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 3), (5, 0, 1), (0, 6, 0)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_train_step_weights_batches_by_their_size(strategy: str, sizes: Sequence[int]) -> None:
    model = seeded()
    optimizer = momentum(model)
    expected = [one_step(model, optimizer, data(step)) for step in range(5)]
    for state, losses in run(loop_of_train_step, strategy, sizes):
        assert_same(state, whole_state(model))
        assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-12)


def weighted_train_step(strategy: str) -> tuple[Tensor, dict[str, Any]]:
    model, _ = wrapped(strategy)
    rank = shoal.world().rank
    loss = model.train_step(*local(0), F.mse_loss, weight=(0.0, 0.5, 1.5)[rank])
    return loss, full_gradients(model)


@distinct
def test_train_step_takes_weights(strategy: str) -> None:
    model = seeded()
    losses = [
        F.mse_loss(model(x), y)
        for x, y in zip(*(tensor.chunk(RANKS) for tensor in data(0)), strict=True)
    ]
    expected = 0.25 * losses[1] + 0.75 * losses[2]
    expected.backward()
    for loss, gradients in run(weighted_train_step, strategy):
        assert torch.allclose(loss, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


def train_step_twice(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy)
    for step in range(2):
        model.train_step(*local(step), F.mse_loss)
    return full_gradients(model)


@distinct
def test_train_step_neither_zeroes_nor_steps(strategy: str) -> None:
    model = seeded()
    for step in range(2):
        x, y = data(step)
        F.mse_loss(model(x), y).backward()
    for gradients in run(train_step_twice, strategy):
        assert_same_gradients(gradients, gradients_of(model))


class Named(nn.Module):
    """Takes its input by name, or a dict as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a: Any, b: Tensor | None = None) -> Tensor:
        if isinstance(a, dict):
            a, b = a["first"], a["second"]
        return self.layer(a if b is None else a + b)


def call_in_many_ways(strategy: str) -> list[Tensor]:
    model, _ = wrapped(strategy, Named)
    x, y = random_numbers(0, 4, 3), random_numbers(1, 4, 2)
    return [
        model.train_step(inputs, y, F.mse_loss)
        for inputs in ((x, x), {"a": x, "b": x}, {"first": x, "second": x}, x + x)
    ]


@pytest.mark.parametrize("loss", [torch.ones(2), 1.0])
def test_train_step_wants_one_number(loss: Any) -> None:
    def step() -> None:
        x, y = local(0)
        wrapped("ddp")[0].train_step(x, y, lambda output, targets: loss)

    with pytest.raises(ValueError, match="the loss must be one number"):
        run(step)


def test_train_step_calls_forward_as_documented() -> None:
    losses = run(call_in_many_ways, "zero3")[0]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


# When gradients are averaged ------------------------------------------------------------------


def accumulate(strategy: str) -> tuple[int, int, dict[str, Any]]:
    model, _ = wrapped(strategy)
    before = num_reductions()
    with model.no_sync():
        for step in (0, 1):
            x, y = local(step)
            F.mse_loss(model(x), y).backward()
    inside = num_reductions() - before
    x, y = local(2)
    F.mse_loss(model(x), y).backward()
    return inside, num_reductions() - before, full_gradients(model)


@each
def test_no_sync_reduces_nothing_and_loses_nothing(strategy: str) -> None:
    for inside, after, gradients in run(accumulate, strategy):
        assert inside == 0
        assert after > 0
        assert_same_gradients(gradients, one_process_gradients([0, 1, 2]))


def leave_no_sync_by_an_error(strategy: str) -> bool:
    model, _ = wrapped(strategy)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    before = num_reductions()
    model(local(0)[0]).sum().backward()
    return num_reductions() > before


def test_no_sync_ends_with_an_error_too() -> None:
    assert all(run(leave_no_sync_by_an_error, "zero2"))


def synchronize_by_hand(strategy: str) -> tuple[int, int, dict[str, Any]]:
    model, optimizer = wrapped(strategy, auto_sync=False)
    before = num_reductions()
    for step in (0, 1):
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
    without = num_reductions() - before
    model.synchronize_gradients()
    with_it = num_reductions() - before
    gradients = full_gradients(model)
    optimizer.step()
    return without, with_it, gradients


@each
def test_gradients_synchronized_by_hand(strategy: str) -> None:
    for without, with_it, gradients in run(synchronize_by_hand, strategy):
        assert without == 0
        assert with_it > 0
        assert_same_gradients(gradients, one_process_gradients([0, 1]))


def synchronize_twice(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy, auto_sync=False)
    x, y = local(0)
    F.mse_loss(model(x), y).backward()
    model.synchronize_gradients()
    model.synchronize_gradients()
    return full_gradients(model)


@distinct
def test_synchronizing_twice_is_synchronizing_once(strategy: str) -> None:
    for gradients in run(synchronize_twice, strategy):
        assert_same_gradients(gradients, one_process_gradients([0]))


def backward_twice(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy)
    for step in (0, 1):
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
    return full_gradients(model)


@each
def test_gradients_add_up_until_they_are_zeroed(strategy: str) -> None:
    for gradients in run(backward_twice, strategy):
        assert_same_gradients(gradients, one_process_gradients([0, 1]))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_whole_gradients_are_where_torch_has_them(strategy: str) -> None:
    def look() -> dict[str, Tensor]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    for gradients in run(look):
        assert_same_gradients(gradients, one_process_gradients([0]))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_change_to_a_gradient_counts(strategy: str) -> None:
    def train() -> State:
        model, optimizer = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        return model.state_dict()

    model = seeded()
    optimizer = momentum(model)
    x, y = data(0)
    (F.mse_loss(model(x), y) / 2).backward()
    optimizer.step()
    for state in run(train):
        assert_same(state, whole_state(model))


def set_gradients_to_none(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy)
    for step in (0, 1):
        for parameter in model.parameters():
            parameter.grad = None
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
    return full_gradients(model)


@distinct
def test_gradients_may_be_set_to_none_by_hand(strategy: str) -> None:
    for gradients in run(set_gradients_to_none, strategy):
        assert_same_gradients(gradients, one_process_gradients([1]))


@each
def test_gradient_shards_cover_everything_once(strategy: str) -> None:
    def look() -> tuple[dict[str, Any], dict[str, int]]:
        model, _ = wrapped(strategy)
        assert all(model.gradient_shard(name) is None for name, _ in model.named_parameters())
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        with pytest.raises(KeyError, match="no parameter named 'nobody'"):
            model.gradient_shard("nobody")
        sizes = {name: model.gradient_shard(name).numel() for name, _ in model.named_parameters()}
        return full_gradients(model), sizes

    found = run(look)
    numel = {name: value.numel() for name, value in seeded().named_parameters()}
    for name, count in numel.items():
        total = sum(sizes[name] for _, sizes in found)
        assert total == count
    assert_same_gradients(found[0][0], one_process_gradients([0]))

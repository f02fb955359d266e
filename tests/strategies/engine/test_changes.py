"""Parameters that are changed in place, outside of `full_parameters`.

Where they are sharded such changes were lost. See also `test_in_place`, over all transports.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from shoal.errors import ShoalError
from strategies.loops import (
    assert_same,
    data,
    each,
    gathered,
    local,
    momentum,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)

Edit = Callable[[Any], None]


@torch.no_grad()
def in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2).mul_(0.9)


def through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def other_memory(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


@torch.no_grad()
def one_row(model: Any) -> None:
    weight = max(model.parameters(), key=Tensor.numel)
    weight[1] = 0.5


def initialised(model: Any) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)


def all_at_once(model: Any) -> None:
    """Memory of all groups is asked for before any of it is written to."""
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.9)
    torch._foreach_add_([parameter.detach() for parameter in model.parameters()], 0.01)


def by_another(model: Any) -> None:
    """As targets follow: the left side's memory is asked for first, then the right side's."""
    parameters = list(model.parameters())
    for target, other in zip(parameters, reversed(parameters), strict=True):
        target.data.mul_(0.9).add_(other.data.mean(), alpha=0.1)


EDITS = [in_place, through_data, other_memory, one_row, initialised, all_at_once, by_another]


def train(model: Any, optimizer: Any, batch: Callable[[int], Any], edit: Edit) -> None:
    for step in range(3):
        one_step(model, optimizer, batch(step))
        edit(model)


def edited_alone(edit: Edit, make: Callable[[], nn.Module] | None = None) -> Any:
    model = seeded() if make is None else seeded(make)
    train(model, momentum(model), data, edit)
    return whole_state(model)


def edited_on_ranks(edit: Edit, strategy: str) -> Any:
    model, optimizer = wrapped(strategy)
    train(model, optimizer, local, edit)
    return model.state_dict()


@each
@pytest.mark.parametrize("edit", EDITS)
def test_changes_count(strategy: str, edit: Edit) -> None:
    expected = edited_alone(edit)
    for state in run(edited_on_ranks, edit, strategy):
        assert_same(state, expected)


# What is looked at before a step is gathered, after those whose turn comes before it. These were
# on their way during the step, and forward took them for the new ones.


class WithTarget(nn.Module):
    """A frozen copy, which backward does not need, so that all others come before it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) - 0.5 * self.target(x)


def train_looking(model: Any, optimizer: Any, batch: Callable[[int], Any]) -> None:
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        next(model.target.parameters()).data.sum()
        optimizer.step()


def looked_at_on_ranks(strategy: str) -> Any:
    model, optimizer = wrapped(strategy, WithTarget)
    train_looking(model, optimizer, local)
    return model.state_dict()


@each
def test_parameters_are_looked_at_between_backward_and_step(strategy: str) -> None:
    model = seeded(WithTarget)
    train_looking(model, momentum(model), data)
    for state in run(looked_at_on_ranks, strategy):
        assert_same(state, whole_state(model))


def written_late(strategy: str) -> str:
    model, optimizer = wrapped(strategy)
    memory = [parameter.data for parameter in model.parameters()]
    one_step(model, optimizer, local(0))
    torch._foreach_mul_(memory, 0.9)
    with pytest.raises(ShoalError) as refused:
        model.state_dict()
    while len(memory) > 1:  # each group has an error of its own, once
        memory.pop()
        with contextlib.suppress(ShoalError):
            model.state_dict()
    model.state_dict()
    return str(refused.value)


@gathered
def test_memory_of_before_a_step_cannot_be_written_to(strategy: str) -> None:
    for message in run(written_late, strategy):
        assert "ask for .data anew after each step" in message


def step_in_other_memory(strategy: str, is_referenced: bool) -> str:
    model, optimizer = wrapped(strategy)
    for parameter in list(model.parameters())[:1]:  # cuts what the optimizer steps
        parameter.requires_grad_(False)
        one_step(model, optimizer, local(0))
        parameter.requires_grad_(True)
    old = [parameter.data for parameter in model.parameters()] if is_referenced else []
    other_memory(model)
    with pytest.raises(ShoalError) if old else contextlib.nullcontext() as refused:
        one_step(model, optimizer, local(1))
    return str(refused.value) if old else ""


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_memory_that_is_stepped_is_not_overwritten_behind_a_reference(strategy: str) -> None:
    for message in run(step_in_other_memory, strategy, True):
        assert "Copy instead: old = p.detach().clone()" in message
    assert set(run(step_in_other_memory, strategy, False)) == {""}


def write_to_given_memory(strategy: str) -> str:
    """Without shoal the step would have changed that memory, and it the parameter."""
    model, optimizer = wrapped(strategy)
    given = [0.9 * parameter.data for parameter in model.parameters()]
    for parameter, memory in zip(model.parameters(), given, strict=True):
        parameter.data = memory
    one_step(model, optimizer, local(0))
    given[0].mul_(0.5)
    with pytest.raises(ShoalError) as refused:
        model.state_dict()
    return str(refused.value)


@each
def test_memory_that_was_given_before_a_step_cannot_be_written_to(strategy: str) -> None:
    for message in run(write_to_given_memory, strategy):
        assert "ask for .data anew after each step" in message


class Constrained(nn.Module):
    """Keeps its weights small, inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = torch.renorm(self.first.weight.data, 2, 0, 0.5)
        self.last.weight.data.mul_(0.9)
        return self.last(torch.tanh(self.first(x)))


@gathered
def test_changes_inside_of_forward(strategy: str) -> None:
    def nothing(model: Any) -> None:
        pass

    def constrained() -> Any:
        model, optimizer = wrapped(strategy, Constrained)
        train(model, optimizer, local, nothing)
        return model.state_dict()

    expected = edited_alone(nothing, Constrained)
    for state in run(constrained):
        assert_same(state, expected)


@gathered
def test_a_change_between_forward_and_backward_is_an_error(strategy: str) -> None:
    """As in plain PyTorch: the gradient would be that of neither value."""

    def changed() -> None:
        model, _ = wrapped(strategy)
        x, y = local(0)
        loss = F.mse_loss(model(x), y)
        in_place(model)
        loss.backward()

    with pytest.raises(RuntimeError, match="changed after forward"):
        run(changed)


@each
@pytest.mark.parametrize("team", [pools.Team("memory", 3), pools.Team("shm", 2)], ids=str)
def test_masters_keep_their_digits_where_nothing_was_written(
    strategy: str, team: pools.Team
) -> None:
    def digits() -> Any:
        module = seeded().float()
        model = shoal.as_distributed(module, strategy=strategy, mixed_precision="bf16")
        before = model.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[0] = 3
        return before, model.state_dict()

    for before, after in team.run(digits):
        for name, value in after.items():
            first, *rest = value.view(-1)
            assert first == 3
            assert rest == before[name].view(-1)[1:].tolist()


@gathered
def test_parameters_that_are_copied(strategy: str) -> None:
    def copies() -> Any:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        parameters = [copy.deepcopy(parameter) for parameter in model.parameters()]
        return parameters, list(model.state_dict().values())

    for parameters, values in run(copies):
        for parameter, value in zip(parameters, values, strict=True):
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter * 2, value * 2)

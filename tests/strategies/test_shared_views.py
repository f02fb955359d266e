"""Gradients and parameters that are swapped, transposed, kept and given to each other.

In plain PyTorch each is a tensor of its own. Here they are views of one buffer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from pools import Team
from shoal.errors import ShoalError

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
TEAMS = [Team("memory", 3), Team("shm", 2), Team("gloo", 2)]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def swapped_gradients(a: Any, b: Any, kept: dict[str, Any]) -> None:
    a.grad, b.grad = b.grad, a.grad


def shifted_gradients(a: Any, b: Any, kept: dict[str, Any]) -> None:
    first = a.grad
    a.grad = b.grad
    b.grad = first * 1.0


def transposed_gradient(a: Any, b: Any, kept: dict[str, Any]) -> None:
    a.grad = a.grad.t()


def transposed_data_of_gradient(a: Any, b: Any, kept: dict[str, Any]) -> None:
    a.grad.data = a.grad.data.t()


def kept_gradient(a: Any, b: Any, kept: dict[str, Any]) -> None:
    """Half of last step's gradient, which must be what it was."""
    before, kept["a"] = kept.get("a"), a.grad
    a.grad = torch.sign(a.grad) if before is None else a.grad + 0.5 * before


def transposed_weight(a: Any, b: Any, kept: dict[str, Any]) -> None:
    a.data = a.data.t()


def swapped_weights(a: Any, b: Any, kept: dict[str, Any]) -> None:
    a.data, b.data = b.data, a.data


EDITS = [
    swapped_gradients, shifted_gradients, transposed_gradient, transposed_data_of_gradient,
    kept_gradient, transposed_weight, swapped_weights,
]  # fmt: skip


def train(edit: Any, strategy: str | None) -> torch.Tensor:
    model, optimizer = build()
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    x = torch.arange(40.0).double().view(8, 5).sin()
    kept: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x * (step + 1)), x.cos()).backward()
        edit(model[0].weight, model[2].weight, kept)
        optimizer.step()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("team", TEAMS, ids=repr)
def test_as_in_one_process(team: Team, edit: Any) -> None:
    wanted = train(edit, None)
    for strategy in STRATEGIES:
        for found in team.run(train, edit, strategy):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_memory_of_another_parameter_is_refused() -> None:
    def tie(a: Any, b: Any, kept: dict[str, Any]) -> None:
        a.data = b.data

    for strategy in STRATEGIES:
        with pytest.raises(ShoalError, match=r"0.weight was given memory of 2.weight"):
            shoal.run(train, 2, "memory", args=(tie, strategy))


def test_parameters_that_share_memory_are_refused() -> None:
    def wrap(is_transposed: bool) -> None:
        model, _ = build()
        data = model[0].weight.data
        model[2].weight.data = data.t() if is_transposed else data
        shoal.as_distributed(model, strategy="ddp")

    for is_transposed in (False, True):
        with pytest.raises(ValueError, match=r"share memory.*b.weight = a.weight"):
            shoal.run(wrap, 2, "memory", args=(is_transposed,))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_parameter_that_is_given_a_sharded_gradient(strategy: str) -> None:
    """The process must not crash."""

    def step_by_hand() -> None:
        model = shoal.as_distributed(build()[0], strategy=strategy)
        for _ in range(2):
            model(torch.ones(2, 5).double()).sum().backward()
            for parameter in model.parameters():
                parameter.data = parameter.data - 0.1 * parameter.grad

    with pytest.raises(ShoalError, match=r"without memory.*in place"):
        shoal.run(step_by_hand, 2, "memory")


def test_state_of_a_parameter_cannot_be_replaced() -> None:
    def replace(how: str) -> None:
        model, _ = build()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = shoal.as_distributed(model, optimizer, strategy="ddp")
        model(torch.ones(2, 5).double()).sum().backward()
        optimizer.step()
        weight = model[0].weight
        optimizer.state[weight]["exp_avg"].zero_()  # in place it counts
        assert not optimizer.state[weight]["exp_avg"].any()
        if how == "item":
            optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
        else:
            optimizer.state.clear()

    for how in ("item", "clear"):
        with pytest.raises(ShoalError, match="load_state_dict"):
            shoal.run(replace, 2, "memory", args=(how,))

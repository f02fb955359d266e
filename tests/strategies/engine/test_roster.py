"""Parameters that come after the model was wrapped: each rank would train them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from shoal.errors import ShoalError
from strategies.loops import each, local, one_step, run, wrapped

Edit = Callable[[nn.Module], None]


class Extensible(nn.Module):
    """Layers that may be replaced, and places for more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(7, 7), nn.Tanh()])
        self.head = nn.Linear(7, 3)
        self.shift: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = part(x)
        return self.head(x)


def by_itself(model: Any) -> None:
    model.shift = nn.Parameter(torch.zeros(3))


def registered(model: Any) -> None:
    model.head.register_parameter("scale", nn.Parameter(torch.ones(3), requires_grad=False))


def in_the_place_of_another(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, 7, dtype=torch.double))


def in_a_layer(model: Any) -> None:
    model.head = nn.Linear(7, 3).double()


def in_a_longer_list(model: Any) -> None:
    model.body.insert(0, nn.Linear(7, 7).double())


def in_a_layer_without_children(model: Any) -> None:
    model.body[1].adapter = nn.Linear(7, 7).double()


def by_parametrization(model: Any) -> None:
    weight_norm(model.head)


LATE = [
    (by_itself, "shift"),
    (registered, "head.scale"),
    (in_the_place_of_another, "head.weight"),
    (in_a_layer, "head.weight (and 1 more)"),
    (in_a_longer_list, "body.0.weight (and 1 more)"),
    (in_a_layer_without_children, "body.1.adapter.weight (and 1 more)"),
    (by_parametrization, "head.parametrizations.weight.original0 (and 1 more)"),
]


@each
@pytest.mark.parametrize(("edit", "name"), LATE)
def test_a_late_parameter_is_an_error_in_the_next_forward(
    strategy: str, edit: Edit, name: str
) -> None:
    def extended() -> None:
        model, optimizer = wrapped(strategy, Extensible)
        one_step(model, optimizer, local(0))
        edit(model)
        with pytest.raises(ShoalError) as refused:
            model(local(1)[0])
        assert f"the parameter {name} was added to the model" in str(refused.value)

    run(extended, ranks=2)


@each
def test_what_brings_no_parameters_may_change(strategy: str) -> None:
    def changed() -> None:
        model, optimizer = wrapped(strategy, Extensible)
        one_step(model, optimizer, local(0))
        model.body[1] = nn.ReLU()
        model.body.append(nn.Identity())
        one_step(model, optimizer, local(1))
        del model.body[0]
        one_step(model, optimizer, local(2))
        model.shift = nn.Parameter(torch.zeros(3))
        with pytest.raises(ShoalError, match="the parameter shift was added"):
            one_step(model, optimizer, local(3))

    run(changed, ranks=2)

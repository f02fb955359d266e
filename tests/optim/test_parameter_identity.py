"""Optimizers that tell parameters apart, and hooks on steps: both have the user's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.errors import MismatchError, ShoalError
from shoal.optim import Kind, find_kind

pytestmark = pytest.mark.filterwarnings("ignore:.*may couple any of its parameters")


class Scaled(Optimizer):
    """Plain descent, with a factor that depends on the parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        first = self.param_groups[0]["params"][0]
        self.prepare(first)

    def prepare(self, first: nn.Parameter) -> None:
        """Remembers it."""

    def factor(self, parameter: nn.Parameter) -> float:
        """What the rate is multiplied by."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] * self.factor(parameter)
                    parameter.add_(parameter.grad, alpha=-rate)


class ByAttribute(Scaled):
    def factor(self, parameter: nn.Parameter) -> float:
        return float(getattr(parameter, "lr_scale", 1.0))


class ByNumber(Scaled):
    def prepare(self, first: nn.Parameter) -> None:
        self.scales = {id(first): 0.1}

    def factor(self, parameter: nn.Parameter) -> float:
        return self.scales.get(id(parameter), 1.0)


class ByIdentity(Scaled):
    def prepare(self, first: nn.Parameter) -> None:
        self.first = first

    def factor(self, parameter: nn.Parameter) -> float:
        return 0.1 if parameter is self.first else 1.0


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    module[0].weight.lr_scale = 0.1  # type: ignore[union-attr, assignment]
    return module


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("kind", [ByAttribute, ByNumber, ByIdentity])
def test_steps_that_tell_parameters_apart(kind: type[Scaled], strategy: str) -> None:
    def build() -> Any:
        module = network()
        batches = [(torch.randn(6, 5).double(), torch.randn(6, 3).double())]
        return module, kind(module.parameters()), batches, F.mse_loss

    shoal.verify(build, strategy=strategy, ranks=3, steps=3).raise_if_different()


def test_what_libraries_write_on_parameters_is_harmless() -> None:
    module = nn.Linear(3, 2)
    module.weight._is_hf_initialized = True  # type: ignore[assignment]
    assert find_kind(ByAttribute(module.parameters())) is Kind.ELEMENT_WISE


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_what_is_written_on_parameters_later_is_refused(strategy: str) -> None:
    def write() -> None:
        module = nn.Linear(5, 3)
        plain: Any = ByAttribute(module.parameters())
        model, optimizer = shoal.as_distributed(module, plain, strategy=strategy)
        for step in range(2):
            model(torch.ones(2, 5)).square().mean().backward()
            if step == 1:
                module.weight.lr_scale = 0.1  # type: ignore[assignment]
                with pytest.raises(ShoalError, match=r"`lr_scale`, which is written on a param"):
                    optimizer.step()
            else:
                optimizer.step()

    shoal.run(write, 2, "memory", timeout=40)


def train_with_hooks(strategy: str | None) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[Any] = []

    def normalise(stepped: Optimizer, *_: Any) -> None:
        for group in stepped.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())

    def look(stepped: Optimizer, *_: Any) -> None:
        seen.append([tuple(p.shape) for g in stepped.param_groups for p in g["params"]])

    optimizer.register_step_pre_hook(normalise)
    rank, size = 0, 1
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        rank, size = shoal.world().rank, shoal.world().size
    optimizer.register_step_post_hook(look)
    for step in range(3):
        rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).double()
        model(rows.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_hooks_on_steps_see_the_users_parameters(strategy: str) -> None:
    shapes, expected = train_with_hooks(None)
    for own_shapes, state in shoal.run(train_with_hooks, 3, "memory", (strategy,), timeout=40):
        assert own_shapes == shapes
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def step_differently(strategy: str) -> str:
    torch.manual_seed(0)
    module = network()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(module, optimizer, strategy=strategy)
    try:
        for _ in range(2):
            model(torch.randn(2, 5).double()).square().mean().backward()
            optimizer.param_groups[0]["lr"] = 0.5 if shoal.world().rank else 0.1
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.zero_grad()
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_rate_that_is_put_back_after_the_step_is_found(strategy: str) -> None:
    for text in shoal.run(step_differently, 2, "memory", (strategy,), timeout=40):
        assert "lr of parameter group 0 in its last step" in text or "drifted apart" in text

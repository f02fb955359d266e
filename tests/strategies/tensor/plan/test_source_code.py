"""What source code says about reads of weights; code that cannot be looked at counts as reading."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.strategies.tensor.plan.source_code import (
    hook_reads_weights,
    reads_weight_of,
    reads_weights,
)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])


class Harmless(Outer):
    """Talks of self.head.weight, and asks for what a part has in common with the whole."""

    def forward(self, x: Tensor) -> Tensor:
        # self.head.weight.norm() would be a read
        assert self.head.bias is not None
        assert isinstance(self.head.weight, torch.Tensor)
        return self.head(x.to(self.head.weight.dtype)), "head.weight"

    def init_all(self) -> None:
        self.head.weight.data.zero_()


class ByAttribute(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.head.weight


class ByGetattr(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ getattr(self.head, "weight")  # noqa: B009


class ByIndex(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layers[0].weight


class InASuperClass(ByAttribute):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Overridden(ByAttribute):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class NotPython(Outer):
    forward = operator.itemgetter(0)


def patched() -> nn.Module:
    module = Harmless()
    module.forward = lambda x: x @ module.head.weight
    return module


@pytest.mark.parametrize("build", [ByAttribute, ByGetattr, InASuperClass, NotPython, patched])
def test_code_that_reads(build: Any) -> None:
    assert reads_weights(build())
    assert reads_weight_of(build(), "head")


@pytest.mark.parametrize("build", [Harmless, Overridden])
def test_code_that_does_not_read(build: Any) -> None:
    assert not reads_weights(build())
    assert not reads_weight_of(build(), "head")


def test_layers_by_number() -> None:
    assert reads_weight_of(ByIndex(), "layers.0")
    assert not reads_weight_of(ByIndex(), "head")


def test_only_modules_around_a_block() -> None:
    module = nn.ModuleDict({"block": ByAttribute()})
    assert reads_weight_of(module, "block.head")
    assert not reads_weight_of(module, "block.head", "block")
    assert not reads_weight_of(ByAttribute(), "head", "")


def test_hooks() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not hook_reads_weights(lambda layer, inputs: None)
    assert hook_reads_weights(lambda layer, inputs: layer.weight.norm())
    assert hook_reads_weights(lambda layer, inputs: next(layer.parameters()).norm())
    assert hook_reads_weights(lambda layer, inputs: weight.norm())
    assert hook_reads_weights(functools.partial(lambda kept, layer, inputs: None, weight))
    assert hook_reads_weights(operator.itemgetter(0))

"""What an optimizer is tried on: layers, sizes of gradients, weight decay, strategies, ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 6
TOLERANCE = 1e-5
# From the inputs to the outputs; most of them do not divide by two or three.
_LAYERS = {"narrow": (9, 16, 11, 5), "wide": (10, 160, 131, 3)}
# Of the loss in each step. Many optimizers do not notice a constant factor, but all notice a jump.
_FACTORS = {
    "usual": (1.0,) * STEPS,
    "large": (300.0,) * STEPS,
    "jump": (1.0,) * (STEPS // 2) + (300.0,) * (STEPS - STEPS // 2),
}
_ROWS = 12


@dataclass(frozen=True)
class Training:
    """One process's: what is to be equal under every strategy.

    Attributes:
        layers: "narrow", or "wide" enough for moments that are factored from a size on.
        gradients: "usual", "large" (300 times that), or a "jump" from one to the other.
        options: Of the optimizer, where they are not its defaults.
    """

    layers: str
    gradients: str
    options: Mapping[str, Any]

    def build(
        self, make: Callable[[nn.Module, Mapping[str, Any]], list[Optimizer]]
    ) -> tuple[nn.Module, list[Optimizer], list[Any], Callable[[Any, Any], Tensor]]:
        """What `shoal.verify` asks for."""
        torch.manual_seed(0)
        model = _model(_LAYERS[self.layers])
        sizes = _LAYERS[self.layers]
        generator = torch.Generator().manual_seed(1)
        batches = [
            (
                torch.randn(_ROWS, sizes[0], generator=generator),
                (torch.randn(_ROWS, sizes[-1], generator=generator), factor),
            )
            for factor in _FACTORS[self.gradients]
        ]
        return model, make(model, self.options), batches, _loss

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.layers}, {self.gradients} gradients{options}"


@dataclass(frozen=True)
class Division:
    """How the training is divided."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks}"


_ALL = tuple(
    Division(strategy, ranks)
    for strategy, ranks in itertools.product(("ddp", "zero1", "zero2", "zero3"), (2, 3))
    if (strategy, ranks) != ("zero1", 3)
)
_SOME = (Division("ddp", 3), Division("zero2", 2), Division("zero3", 3))
_FEW = (Division("ddp", 2), Division("zero2", 3))


def divisions(training: Training) -> tuple[Division, ...]:
    """In all ways for the plainest training, and in fewer for its variations."""
    if training.options:
        return _FEW
    return _ALL if training.gradients == "usual" else _SOME


def trainings(known_options: Collection[str], *, is_quick: bool = False) -> Iterator[Training]:
    """All of them, or those with a jump, which find most; narrow layers first."""
    for layers in _LAYERS:
        for gradients in ["jump"] if is_quick else _FACTORS:
            yield Training(layers, gradients, {})
            if "weight_decay" in known_options:
                yield Training(layers, gradients, {"weight_decay": 0.1})
        if "foreach" in known_options:  # what CUDA tensors are stepped with
            yield Training(layers, "jump", {"foreach": True})


def _model(sizes: tuple[int, ...]) -> nn.Module:
    first, second, third, last = sizes
    return nn.Sequential(
        nn.Linear(first, second),
        nn.LayerNorm(second),
        nn.Tanh(),
        nn.Linear(second, third),
        nn.Tanh(),
        nn.Linear(third, last),
    )


def _loss(output: Tensor, target: tuple[Tensor, float]) -> Tensor:
    expected, factor = target
    return factor * nn.functional.mse_loss(output, expected)

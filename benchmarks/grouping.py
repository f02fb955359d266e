"""A thousand small layers under ZeRO-3, with and without grouping: what communication costs.

[Note: exposed communication]
Communication that runs while the rank computes costs nothing. What counts is how much longer a
step takes than what a rank computes in it: forward and backward of its batch, and AdamW on its
share of the parameters. That is measured too, on all ranks at once, without any communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timing import alternate
from torch import Tensor, nn

import shoal
from shoal.comm import Backend
from shoal.optim import PAIRS
from shoal.sharding import analyzer

SILENT, GROUPED, UNGROUPED = "no communication", "grouped", "each layer by itself"
_WARM_UP_ROUNDS = 2
# A thousand layers multiply: faster learning would make numbers overflow.
_LR = 1e-6


@dataclass(frozen=True)
class Chain:
    """Linear layers, one after the other, and the rows of a rank's batch."""

    layers: int = 1000
    width: int = 256
    rows: int = 32

    def build(self) -> nn.Sequential:
        """Layers that neither shrink nor grow what goes through them."""
        torch.manual_seed(0)
        layers = [nn.Linear(self.width, self.width) for _ in range(self.layers)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=self.width**-0.5)
        return nn.Sequential(*layers)

    def batch(self, rank: int) -> Tensor:
        """A rank's own."""
        return torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(rank))

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}x{self.width}"


def measure(chain: Chain, rounds: int) -> dict[str, Any]:
    """Called on every rank."""
    torch.set_num_threads(1)
    backend = shoal.world().backend
    inputs = chain.batch(backend.rank)
    grouped, step_grouped = _sharded(chain, inputs, backend)
    with ungrouped() as options:
        alone, step_alone = _sharded(chain, inputs, backend, **options)
    steps = {
        SILENT: _silent(chain, inputs, backend.size),
        GROUPED: step_grouped,
        UNGROUPED: step_alone,
    }
    alternate(steps, backend, _WARM_UP_ROUNDS)
    times = alternate(steps, backend, rounds)
    return {
        "chain": str(chain),
        "backend": backend.name,
        "ranks": backend.size,
        "groups": {GROUPED: len(grouped.engine.groups), UNGROUPED: len(alone.engine.groups)},
        "times_s": {name: each.as_dict() for name, each in times.items()},
    }


@contextlib.contextmanager
def ungrouped() -> Iterator[dict[str, int]]:
    """Inside, each layer is a group; yields the options of the model.

    Without a least size there are still at most 48 groups and two, so that limit goes too.
    """
    before = analyzer._MOST_GROUPS
    analyzer._MOST_GROUPS = 1 << 62
    try:
        yield {"min_group_bytes": 0}
    finally:
        analyzer._MOST_GROUPS = before


def _sharded(
    chain: Chain, inputs: Tensor, backend: Backend, **options: int
) -> tuple[Any, Callable[[], None]]:
    model_class, optimizer_class = PAIRS["zero3"]
    module = chain.build()
    plain = torch.optim.AdamW(module.parameters(), lr=_LR, fused=True)
    model = model_class(module, backend, **options)  # type: ignore[arg-type]
    return model, _step(model, optimizer_class(plain, model), inputs)


def _silent(chain: Chain, inputs: Tensor, num_ranks: int) -> Callable[[], None]:
    """See [Note: exposed communication]."""
    module = chain.build()
    parameters = list(module.parameters())
    share = parameters[: len(parameters) // num_ranks]
    step = _step(module, torch.optim.AdamW(share, lr=_LR, fused=True), inputs)

    def step_and_clear() -> None:
        module.zero_grad()  # the optimizer knows of its share only
        step()

    return step_and_clear


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step

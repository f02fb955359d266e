"""`torch.compile`, of a module or a part of it, before it is wrapped and afterwards.

Over threads a gather inside of tracing never ended: whoever traces holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leaks
import shoal
from strategies.loops import (
    RANKS,
    assert_same,
    distinct,
    gathered,
    local,
    momentum,
    one_process,
    one_step,
    run,
    seeded,
)

Compile = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    whole(nn.Linear(1, 1))(torch.ones(1, 1)).backward()  # what torch keeps for the process
    torch._dynamo.reset()
    leaks.baseline()
    yield
    torch._dynamo.reset()


class Stacked(nn.Module):
    """Two groups of parameters inside of what is compiled, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


def part(module: Any) -> nn.Module:
    module.body.compile(backend="aot_eager")
    return module  # type: ignore[no-any-return]


@distinct
@pytest.mark.parametrize("compiled", [whole, part])
def test_compiled_before_it_is_wrapped(strategy: str, compiled: Compile) -> None:
    def train() -> Any:
        module = seeded(Stacked)
        model, optimizer = shoal.as_distributed(
            compiled(module), momentum(module), strategy=strategy, min_group_bytes=300
        )
        for step in range(3):
            one_step(model, optimizer, local(step))
        state = model.state_dict()
        return {name.removeprefix("_orig_mod."): value for name, value in state.items()}

    expected = one_process(range(3), Stacked)
    for state in run(train):
        assert_same(state, expected)


@gathered
def test_threads_that_gather_while_one_is_traced(strategy: str) -> None:
    def train() -> None:
        module = seeded(Stacked)
        model = shoal.as_distributed(module, strategy=strategy)
        torch.compile(model, backend="eager")(local(0)[0])

    with pytest.raises(Exception, match="ranks that are threads cannot communicate while"):
        run(train, ranks=RANKS)

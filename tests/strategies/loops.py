"""The pieces of small training loops that tests of behaviour are made of.

They lie in a module of their own so that ranks import them, and need not be sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from strategies.models import OddMLP, random_numbers
from strategies.training import STRATEGIES

RANKS = 3
# FSDP is ZeRO-3 by another name in most of this, so it is for `make test-full`.
_FSDP = pytest.param("fsdp", marks=pytest.mark.full)
each = pytest.mark.parametrize("strategy", [*STRATEGIES[:-1], _FSDP])
distinct = pytest.mark.parametrize("strategy", STRATEGIES[:-1])
gathered = pytest.mark.parametrize("strategy", ["zero3", _FSDP])

State = dict[str, Tensor]
BuildModule = Callable[[], nn.Module]


def run(fn: Callable[..., Any], *args: Any, ranks: int = RANKS) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def inside(
    optimizer: torch.optim.Optimizer,
    before: Callable[..., object] = lambda _: None,
    after: Callable[..., object] = lambda _: None,
) -> None:
    """Calls something inside of an optimizer's own step, where it has the rank's memory."""
    step = optimizer.step

    def looked_at(*args: Any) -> Any:
        before(optimizer)
        result = step(*args)
        after(optimizer)
        return result

    optimizer.step = looked_at  # type: ignore[method-assign]


def seeded(make: BuildModule = OddMLP) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def momentum(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def wrapped(strategy: str, make: BuildModule = OddMLP, **options: Any) -> tuple[Any, Any]:
    """A seeded model in several groups, and its optimizer."""
    module = seeded(make)
    options = {"min_group_bytes": 300, **options}
    return shoal.as_distributed(module, momentum(module), strategy=strategy, **options)


def data(step: int, items: int = 2 * RANKS, inputs: int = 7, outputs: int = 3) -> Any:
    numbers = random_numbers(step, items, inputs + outputs)
    return numbers[:, :inputs], numbers[:, inputs:]


def local(step: int, **sizes: int) -> Any:
    """This rank's part of a step's batch."""
    world = shoal.world()
    return [tensor.chunk(world.size)[world.rank] for tensor in data(step, **sizes)]


def one_step(model: Any, optimizer: Any, batch: Sequence[Tensor]) -> Tensor:
    x, y = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole_state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def one_process(steps: Sequence[int] | range, make: BuildModule = OddMLP) -> State:
    model = seeded(make)
    optimizer = momentum(model)
    for step in steps:
        one_step(model, optimizer, data(step))
    return whole_state(model)


def assert_same(state: State, expected: State, tolerance: float = 1e-10) -> None:
    assert list(state) == list(expected)
    for name, value in state.items():
        assert value.shape == expected[name].shape
        assert torch.allclose(value, expected[name], rtol=0, atol=tolerance), name


def full_gradients(model: Any) -> dict[str, Tensor | None]:
    """The averaged gradient of each parameter, put together from the ranks' parts."""
    world = shoal.world()
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        parts = world.all_gather_object(model.gradient_shard(name))
        missing = {part is None for part in parts}
        assert len(missing) == 1
        found[name] = None if True in missing else torch.cat(parts).view(parameter.shape)
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    assert list(found) == list(expected)
    for name, gradient in found.items():
        other = expected[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.allclose(gradient, other, rtol=0, atol=1e-12), name


def num_reductions() -> int:
    counters = shoal.world().stats()
    names = ("all_reduce", "reduce_scatter")
    return sum(counters[name].calls for name in names if name in counters)


def one_process_gradients(steps: Sequence[int], make: BuildModule = OddMLP) -> Any:
    model = seeded(make)
    for step in steps:
        x, y = data(step)
        F.mse_loss(model(x), y).backward()
    return gradients_of(model)


def num_gathers() -> int:
    counters = shoal.world().stats()
    return counters["all_gather"].calls if "all_gather" in counters else 0


def num_present(model: Any) -> int:
    return sum(group.is_sharded and group.has_whole for group in model.engine.groups)

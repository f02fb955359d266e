"""Memory that is gathered into again: by whom, and never while somebody looks at it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pools
import shoal
from shoal.strategies.engine.gather_buffers import FILL_VARIABLE, GatherBuffer
from shoal.torch_internals.tensors import as_plain_tensors

NUM_LAYERS = 8
WIDTH = 5


def wrapped(
    width_of: Callable[[int], int] = lambda _: WIDTH, strategy: str = "zero3"
) -> tuple[Any, Any]:
    """A group for each layer."""
    torch.manual_seed(0)
    widths = [width_of(number) for number in range(NUM_LAYERS + 1)]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return shoal.as_distributed(model, optimizer, strategy=strategy, min_group_bytes=0)


def count_allocations(is_alike: bool) -> list[int]:
    """How many buffers a forward and a backward use, at last when the order is known."""
    model, optimizer = wrapped() if is_alike else wrapped(lambda number: WIDTH + number)
    buffers = model.engine.gathering._buffers
    take, taken = buffers.take, []

    def noted(group: Any) -> GatherBuffer:
        taken.append(take(group))
        return taken[-1]

    buffers.take = noted
    counts = []
    for _ in range(2):
        taken.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        counts.append(len({id(buffer) for buffer in taken}))
        optimizer.step()
        optimizer.zero_grad()
    return counts


def test_layers_alike_share_few_buffers() -> None:
    # In a forward and in a backward: one in use, and one on its way.
    for counts in shoal.run(count_allocations, 2, "memory", args=(True,)):
        assert counts[-1] <= 2 * 2


def test_layers_of_other_sizes_have_their_own() -> None:
    for counts in shoal.run(count_allocations, 2, "memory", args=(False,)):
        assert counts[-1] >= NUM_LAYERS


def keep_views() -> None:
    """A user's hooks keep what they saw of each layer."""
    model, optimizer = wrapped()
    seen: list[tuple[Tensor, Tensor]] = []

    def look(layer: nn.Module, *_: object) -> None:
        weight = layer.weight.detach()
        seen.append((weight, weight.clone()))

    for layer in model.module:
        layer.register_forward_hook(look)
    for _ in range(3):
        seen.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        assert len(seen) == NUM_LAYERS
        for view, copy in seen:
            assert view.equal(copy)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("team", [pools.Team("memory", 3), pools.Team("gloo", 2)], ids=str)
def test_what_users_look_at_stays_what_it_was(team: pools.Team) -> None:
    team.run(keep_views)


class ThroughNumpy(nn.Linear):
    """Autograd saves the weight as a tensor whose storage begins at the weight, not the whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ torch.from_numpy(self.weight.detach().numpy()).t()


def gradient_through_numpy(strategy: str) -> Tensor:
    """What arrives at the input, past two layers of one group."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(ThroughNumpy(WIDTH, WIDTH), ThroughNumpy(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if strategy != "plain":
        model, _ = shoal.as_distributed(model, optimizer, strategy=strategy)
    for _ in range(2):
        x = torch.ones(2, WIDTH, requires_grad=True)
        model(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_saved_memory_of_another_storage_is_found_by_its_address() -> None:
    expected = gradient_through_numpy("plain")
    for found in shoal.run(gradient_through_numpy, 2, "memory", args=("zero3",)):
        assert found.equal(expected)


def memory_between_passes() -> list[tuple[int, int]]:
    """Bytes of parameters after a forward, a backward and a step, and those of the shards."""
    model, optimizer = wrapped()
    shards = sum(group.shard.nbytes for group in model.engine.groups)
    found = []
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH)).sum()
        found.append((shoal.world().stats().memory["parameters"].current, shards))
        loss.backward()
        found.append((shoal.world().stats().memory["parameters"].current, shards))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_none_outlives_a_pass() -> None:
    for found in shoal.run(memory_between_passes, 2, "memory"):
        for held, shards in found:
            assert held == shards


def look_before_training() -> bool:
    """A buffer of inference mode could not be trained with."""
    model, optimizer = wrapped()
    with torch.inference_mode():
        model(torch.ones(2, WIDTH))
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    return all(parameter.grad is not None for parameter in model.parameters())


def test_inference_first() -> None:
    assert all(shoal.run(look_before_training, 2, "memory"))


def trained(strategy: str) -> list[Tensor]:
    """Parameters after three steps, one with gradients of two backwards."""
    model, optimizer = wrapped(strategy=strategy)
    rank = shoal.world().rank
    for step in range(3):
        for part in range(1 + step % 2):
            model(torch.full((2, WIDTH), 0.1 * (rank + step + part))).square().sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_nothing_reads_freed_memory(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shoal.run(trained, 2, "memory", args=(strategy,))[0]
    monkeypatch.setenv(FILL_VARIABLE, "1")
    for found in shoal.run(trained, 2, "memory", args=(strategy,)):
        for value, other in zip(found, expected, strict=True):
            assert value.equal(other)


def look_at_absent_memory() -> list[bool]:
    """What something sees that goes past all that gathers."""
    model, _ = wrapped()
    with as_plain_tensors():
        return [bool(parameter.detach().isnan().all()) for parameter in model.parameters()]


def test_an_absent_parameter_is_not_a_number() -> None:
    assert all(shoal.run(look_at_absent_memory, 2, "memory")[0])

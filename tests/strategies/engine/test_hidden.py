"""Wholes that backward gathers for what autograd saved: parameters stay absent until used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.strategies.engine.flat_group import GroupState

NUM_LAYERS, WIDTH = 4, 3


class Interruption(Exception):
    """A backward fails."""


def wrapped() -> tuple[Any, list[nn.Linear]]:
    """A group for each layer, and the layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return shoal.as_distributed(nn.Sequential(*layers), strategy="zero3", min_group_bytes=0), layers


def run_backward(model: Any, layer: nn.Module, look: Any) -> None:
    """Calls something in backward, when the gradient of a layer's output is there."""

    def called(_: Tensor) -> None:
        look()

    def hang(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(called)

    handle = layer.register_forward_hook(hang)
    loss = model(torch.ones(2, WIDTH)).square().sum()
    handle.remove()
    loss.backward()


def states_in_backward() -> list[set[GroupState]]:
    """Of all groups, each time that a layer's backward is about to begin."""
    model, layers = wrapped()
    seen: list[set[GroupState]] = []
    for layer in layers:
        run_backward(model, layer, lambda: seen.append({g.state for g in model.engine.groups}))
    return seen


def test_backward_shows_no_parameters() -> None:
    for seen in shoal.run(states_in_backward, 2, "memory"):
        assert not any(GroupState.PRESENT in states for states in seen)
        assert any(GroupState.HIDDEN in states for states in seen)


def weights_seen_in_backward() -> list[tuple[Tensor, Tensor]]:
    """What a hook finds of a layer whose backward is about to begin, and what is right."""
    model, layers = wrapped()
    found: list[Tensor] = []
    for layer in layers:
        run_backward(model, layers[-1], lambda layer=layer: found.append(layer.weight * 1))
    with model.full_parameters():
        return [(a.detach(), b.weight.clone()) for a, b in zip(found, layers, strict=True)]


def test_a_use_in_backward_shows_them() -> None:
    for pairs in shoal.run(weights_seen_in_backward, 2, "memory"):
        for found, expected in pairs:
            assert found.equal(expected)


def change_in_backward() -> tuple[Tensor, Tensor]:
    """Past autograd and its counters, in the middle of a backward."""
    model, layers = wrapped()
    run_backward(model, layers[-1], lambda: layers[0].weight.data.fill_(2.0))
    with model.full_parameters():
        return layers[0].weight.detach().clone(), layers[1].weight.detach().clone()


def test_a_change_in_backward_counts() -> None:
    for changed, other in shoal.run(change_in_backward, 2, "memory"):
        assert changed.eq(2.0).all()
        assert not other.eq(2.0).any()


def go_on_after_failure() -> tuple[Tensor, Tensor]:
    """A forward after a backward that failed with wholes in memory, and one before it."""
    model, layers = wrapped()
    expected = model(torch.ones(2, WIDTH)).detach()

    def fail() -> None:
        raise Interruption

    with pytest.raises(Interruption):
        run_backward(model, layers[1], fail)
    assert any(group.state is GroupState.HIDDEN for group in model.engine.groups)
    return expected, model(torch.ones(2, WIDTH)).detach()


def test_a_backward_that_failed_leaves_nothing_hidden() -> None:
    for expected, found in shoal.run(go_on_after_failure, 2, "memory"):
        assert found.equal(expected)

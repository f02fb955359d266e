"""Gradients of split layers over the data axis: averaged over ranks that have the same parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.comm import Mesh
from shoal.errors import ShoalError
from strategies.tensor.tasks import text_loss
from strategies.tensor.test_tensor_parallel import (
    adam,
    assert_same,
    batch,
    one_process,
    seeded,
    wrapped,
)


def run(fn: Any, *args: Any, ranks: int = 4) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def num_reductions() -> int:
    counters = shoal.world().stats()
    names = ("all_reduce", "reduce_scatter")
    return sum(counters[name].calls for name in names if name in counters)


def trained_on_a_grid(steps: int = 2) -> dict[str, Tensor]:
    model, optimizer = wrapped(adam, tensor=2)
    for step in range(steps):
        optimizer.zero_grad()
        text_loss(model, batch(step, model)).backward()
        optimizer.step()
    return model.state_dict()


def test_p21_parts_are_averaged_over_the_ranks_that_have_the_same_parts() -> None:
    """Parts of different ranks were averaged with each other, over the whole world."""

    def groups() -> tuple[tuple[int, ...], tuple[int, ...]]:
        model, _ = wrapped(tensor=2)
        return model.engine.backend.ranks, model.tensor_group.ranks

    assert run(groups) == [((0, 2), (0, 1)), ((1, 3), (0, 1)), ((0, 2), (2, 3)), ((1, 3), (2, 3))]
    expected = one_process(adam, range(2))[0].state_dict()
    for state in run(trained_on_a_grid):
        assert_same(state, expected)


def test_p21_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Mesh.group

    def everybody(self: Mesh, axis: str) -> Any:
        return self._backend if axis == "data" else right(self, axis)

    monkeypatch.setattr(Mesh, "group", everybody)
    expected = one_process(adam, range(2))[0].state_dict()
    with pytest.raises((ShoalError, AssertionError)):
        assert_same(run(trained_on_a_grid)[0], expected)


def test_p23_gradients_are_summed_and_parameters_are_not() -> None:
    """Parameters were averaged where gradients should be."""

    def train() -> tuple[dict[str, Tensor], int]:
        model, optimizer = wrapped(adam, tensor=2)
        in_steps = 0
        for step in range(3):
            optimizer.zero_grad()
            text_loss(model, batch(step, model)).backward()
            before = num_reductions()
            optimizer.step()
            in_steps += num_reductions() - before
        return model.state_dict(), in_steps

    expected = one_process(adam, range(3))[0].state_dict()
    for state, in_steps in run(train):
        assert in_steps == 0
        assert_same(state, expected)


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.full)])
def test_p33_synchronizing_is_no_no_op_because_layers_are_split(zero: int) -> None:
    """Synchronization returned at once "because the model is sharded already"."""

    def train() -> tuple[int, dict[str, Tensor]]:
        model, _ = wrapped(tensor=2, zero=zero, auto_sync=False)
        text_loss(model, batch(0, model)).backward()
        before = num_reductions()
        model.synchronize_gradients()
        count = num_reductions() - before
        return count, dict(model.full_gradients())

    plain = seeded()
    text_loss(plain, batch(0)).backward()
    for count, gradients in run(train):
        assert count > 0
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)

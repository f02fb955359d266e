"""Mistakes that earlier attempts made with split layers, by the id of the mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm import Mesh
from shoal.errors import MismatchError, ShoalError
from strategies.tensor.tasks import text_loss
from strategies.tensor.test_model import adam, assert_same, batch, one_process, seeded, wrapped

pytestmark = pytest.mark.timeout(60)


def run(fn: Any, *args: Any, ranks: int = 4) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def num_reductions() -> int:
    counters = shoal.world().stats()
    names = ("all_reduce", "reduce_scatter")
    return sum(counters[name].calls for name in names if name in counters)


# P21 ----------------------------------------------------------------------------------------


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


# P22 ----------------------------------------------------------------------------------------


def test_p22_a_part_is_never_taken_for_the_whole() -> None:
    """A part was given where the full parameter was expected."""

    def check() -> None:
        model, optimizer = wrapped(adam)
        text_loss(model, batch(0)).backward()
        optimizer.step()
        whole = {name: value.shape for name, value in seeded().state_dict().items()}
        assert {name: value.shape for name, value in model.state_dict().items()} == whole
        with model.full_parameters():
            assert {n: p.shape for n, p in model.named_parameters()} == {
                n: p.shape for n, p in seeded().named_parameters()
            }
        parts = {name: value.clone() for name, value in model.module.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"size mismatch for blocks.0.attention.q_proj"):
            model.load_state_dict(parts)
        state = optimizer.state_dict()["state"]
        for number, parameter in enumerate(seeded().parameters()):
            assert state[number]["exp_avg"].shape == parameter.shape

    run(check, ranks=3)


# P23 ----------------------------------------------------------------------------------------


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


# P33 ----------------------------------------------------------------------------------------


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


def test_other_batches_in_one_tensor_group_are_refused() -> None:
    """Each rank's part of a layer was multiplied with something else, and nobody said a word."""

    def forward(is_plain: bool) -> None:
        model = shoal.as_distributed(nn.Linear(4, 4), strategy="tensor")
        inputs = torch.ones(2, 4)
        inputs[0, shoal.world().rank] = 3.0
        model(inputs) if is_plain else model.train_step(inputs, inputs, F.mse_loss)

    for is_plain in (True, False):
        with pytest.raises(MismatchError, match="must be given the same batch; ranks 0 and 1"):
            shoal.run(forward, 2, "memory", args=(is_plain,))


@pytest.mark.parametrize("fused", [None, True])
def test_what_every_rank_has_stays_the_same_where_layers_are_split_unevenly(fused: Any) -> None:
    """Fused kernels round the last elements of a piece of memory differently from the others.

    Ranks with parts of different sizes have other elements there, and drifted apart.
    """

    def train() -> dict[str, Tensor]:
        torch.manual_seed(0)
        norms = nn.LayerNorm(13), nn.LayerNorm(13)
        plain = nn.Sequential(norms[0], nn.Linear(13, 27), nn.ReLU(), nn.Linear(27, 13), norms[1])
        adamw = torch.optim.AdamW(plain.parameters(), 0.01, fused=fused)
        model, optimizer = shoal.as_distributed(plain, adamw, strategy="tensor")
        assert not any(map(model.parts.is_even, model.parts.splits))
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 13)).pow(2).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is fused
        return model.state_dict()

    one, other = run(train, ranks=2)
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []

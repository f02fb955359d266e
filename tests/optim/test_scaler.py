"""Gradient scaling: ranks unscale what they hold, and skip a step together or not at all."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import pools
import shoal
from shoal.errors import MismatchError, ShoalError
from shoal.optim import GradScaler
from strategies.loops import (
    RANKS,
    State,
    assert_same,
    data,
    distinct,
    each,
    local,
    momentum,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import OddMLP, Unused

SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
# The third step is not finite, on one rank only.
BAD_STEP, BAD_RANK, STEPS = 2, 1, 6


class Spoilable(OddMLP):
    """Gradients that are not finite can be kept to the last layer."""

    def forward(self, x: Tensor, is_spoilt: bool = False) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        if is_spoilt:
            x.register_hook(torch.zeros_like)
        return self.layers[-1](x)


def rank_loss(model: Any, step: int, rank: int, num_ranks: int) -> Tensor:
    """The loss of a rank's rows."""
    x, y = (tensor.chunk(num_ranks)[rank] for tensor in data(step))
    is_spoilt = (step, rank) == (BAD_STEP, BAD_RANK)
    output = model(x, is_spoilt)
    loss = F.mse_loss(output, y)
    # A single row of the last layer, so that not every rank has some of what is not finite.
    return loss + float("inf") * output[:, -1].sum() if is_spoilt else loss


def loss_of(model: Any, step: int, num_ranks: int | None) -> Tensor:
    """This rank's loss; in one process the mean over as many ranks."""
    if num_ranks is None:
        world = shoal.world()
        return rank_loss(model, step, world.rank, world.size)
    return torch.stack([rank_loss(model, step, r, num_ranks) for r in range(num_ranks)]).mean()


def train(
    strategy: str | None,
    build: Callable[[Any], Any] = momentum,
    clip: str = "model",
    num_ranks: int = RANKS,
    make_scaler: Any = GradScaler,
) -> tuple[State, list[float]]:
    """The state after some steps, and the scale after each; None: one process, torch's scaler."""
    model: Any = seeded(Spoilable)
    optimizers: Any = build(model)
    scaler: Any = torch.amp.GradScaler("cpu", **SETTINGS)
    if strategy is not None:
        model, optimizers = shoal.as_distributed(
            model, optimizers, strategy=strategy, min_group_bytes=300
        )
        scaler = make_scaler("cpu", **SETTINGS)
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    scales = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss_of(model, step, None if strategy else num_ranks)).backward()
        take_step(model, optimizers, scaler, clip if strategy else f"torch {clip}")
        scales.append(scaler.get_scale())
    return whole_state(model), scales


def take_step(model: Any, optimizers: Sequence[Any], scaler: Any, clip: str) -> None:
    if "model" in clip:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if "torch" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            model.clip_grad_norm_(0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


@each
@pytest.mark.parametrize("clip", ["no", "model"])
def test_equals_torch_s_scaler_in_one_process(strategy: str, clip: str) -> None:
    expected, expected_scales = train(None, clip=clip)
    assert len(set(expected_scales)) > 1  # it has grown, and shrunk
    for state, scales in run(train, strategy, momentum, clip):
        assert_same(state, expected)
        assert scales == expected_scales


BUILDS: dict[str, Callable[[Any], Any]] = {
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3, fused=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "two": lambda m: [
        torch.optim.SGD(m.layers[1].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW([*m.layers[0].parameters(), *m.layers[2].parameters()], lr=0.1, eps=1e-3),
    ],
}


@distinct
@pytest.mark.parametrize("name", list(BUILDS))
def test_any_optimizer(strategy: str, name: str) -> None:
    # Clipping by a norm that is not finite spoils what an optimizer of several does not skip.
    clip = "no" if name == "two" else "model"
    expected, expected_scales = train(None, BUILDS[name], clip)
    tolerance = 1e-6 if name == "adafactor" else 1e-10
    for state, scales in run(train, strategy, BUILDS[name], clip):
        assert_same(state, expected, tolerance)
        assert scales == expected_scales


@distinct
def test_an_optimizer_whose_gradients_are_finite_is_not_skipped(strategy: str) -> None:
    """The first of the two has no part in what is spoilt, even where groups are shared."""

    def step_both(is_wrapped: bool) -> State:
        model: Any = seeded(Spoilable)
        optimizers: Any = BUILDS["two"](model)
        scaler: Any = torch.amp.GradScaler("cpu", **SETTINGS)
        if is_wrapped:
            model, optimizers = shoal.as_distributed(
                model, optimizers, strategy=strategy, min_group_bytes=1 << 20
            )
            scaler = GradScaler("cpu", **SETTINGS)
        scaler.scale(loss_of(model, BAD_STEP, None if is_wrapped else RANKS)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return whole_state(model)

    begin, expected = whole_state(seeded(Spoilable)), step_both(False)
    assert torch.equal(expected["layers.2.weight"], begin["layers.2.weight"])
    assert torch.equal(expected["layers.0.weight"], begin["layers.0.weight"])
    assert not torch.equal(expected["layers.1.weight"], begin["layers.1.weight"])
    for state in run(step_both, True):
        assert_same(state, expected)


@pytest.mark.filterwarnings("ignore:.*may couple any of its parameters")
@distinct
def test_an_optimizer_that_needs_everything(strategy: str) -> None:
    class Coupled(torch.optim.SGD):
        """Steps by how many tensors it has."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = 0.1 / len(group["params"])
            return super().step(closure)

    def build(model: Any) -> Optimizer:
        return Coupled(model.parameters(), lr=0.1)

    expected, expected_scales = train(None, build)
    for state, scales in run(train, strategy, build):
        assert_same(state, expected)
        assert scales == expected_scales


@distinct
def test_parameters_that_nobody_used(strategy: str) -> None:
    def use_some(is_wrapped: bool) -> State:
        model: Any = seeded(Unused)
        optimizer: Any = momentum(model)
        scaler: Any = torch.amp.GradScaler("cpu", **SETTINGS)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
            scaler = GradScaler("cpu", **SETTINGS)
        for step, use in enumerate((False, True, False)):
            optimizer.zero_grad()
            x, y = local(step) if is_wrapped else data(step)
            scaler.scale(F.mse_loss(model(x, use), y)).backward()
            take_step(model, [optimizer], scaler, "model" if is_wrapped else "torch model")
        return whole_state(model)

    expected = use_some(False)
    for state in run(use_some, True):
        assert_same(state, expected)


@distinct
def test_accumulation(strategy: str) -> None:
    def accumulate() -> State:
        model, optimizer = wrapped(strategy)
        scaler = GradScaler("cpu", **SETTINGS)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                with model.no_sync() if part == 0 else contextlib.nullcontext():
                    x, y = local(2 * step + part)
                    scaler.scale(F.mse_loss(model(x), y)).backward()
            take_step(model, [optimizer], scaler, "model")
        return whole_state(model)

    model = seeded()
    optimizer = momentum(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            x, y = data(2 * step + part)
            F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for state in run(accumulate):
        assert_same(state, whole_state(model))


def train_over_processes(strategy: str) -> tuple[State, list[float]]:
    found = train(strategy)
    gc.collect()  # it holds groups, and they connections
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_over_shared_memory(strategy: str) -> None:
    expected, expected_scales = train(None, num_ranks=2)
    for state, scales in pools.Team("shm", 2).run(train_over_processes, strategy):
        assert_same(state, expected)
        assert scales == expected_scales


def test_one_rank_alone() -> None:
    def train_alone() -> tuple[State, list[float]]:
        model, optimizer = wrapped("zero2")
        scaler = GradScaler("cpu", **SETTINGS)
        scaler.scale(F.mse_loss(model(data(0)[0]), data(0)[1])).backward()
        take_step(model, [optimizer], scaler, "no")
        return whole_state(model), [scaler.get_scale()]

    model = seeded()
    F.mse_loss(model(data(0)[0]), data(0)[1]).backward()
    momentum(model).step()
    ((state, scales),) = run(train_alone, ranks=1)
    assert_same(state, whole_state(model))
    assert scales == [1024.0]


# Torch's own, and what is refused ---------------------------------------------------------------


@each
@pytest.mark.parametrize("clip", ["no", "model"])
def test_torch_s_own_scaler(strategy: str, clip: str) -> None:
    """Ranks agree whether a gradient is not finite, also those that hold none of it."""
    expected, expected_scales = train(None, clip=clip)
    for state, scales in run(train, strategy, momentum, clip, RANKS, torch.amp.GradScaler):
        assert_same(state, expected)
        assert scales == expected_scales


@each
@pytest.mark.parametrize("name", ["fused", "adafactor"])
def test_torch_s_own_scaler_with_any_optimizer(strategy: str, name: str) -> None:
    expected, expected_scales = train(None, BUILDS[name])
    tolerance = 1e-6 if name == "adafactor" else 1e-10
    for state, scales in run(train, strategy, BUILDS[name], "model", RANKS, torch.amp.GradScaler):
        assert_same(state, expected, tolerance)
        assert scales == expected_scales


@distinct
def test_the_user_s_object_is_not_stepped_past_the_ranks(strategy: str) -> None:
    def step_it() -> None:
        model, optimizer = wrapped(strategy)
        scaler = torch.amp.GradScaler("cpu", **SETTINGS)
        begin = whole_state(model)
        x, y = local(0)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        with pytest.raises(ShoalError, match="step the one that"):
            scaler.step(optimizer.optimizer)
        with pytest.raises(ShoalError, match="save and load with the one that"):
            optimizer.optimizer.state_dict()
        assert_same(whole_state(model), begin, 0)

    run(step_it)


@distinct
def test_a_step_that_is_skipped_by_hand_spoils_nothing(strategy: str) -> None:
    """Clipping by a norm that is not finite, then training on."""

    def skip(is_wrapped: bool) -> State:
        model: Any = seeded(Spoilable)
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, None if is_wrapped else RANKS).backward()
            if is_wrapped:
                norm = model.clip_grad_norm_(0.5)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert torch.isfinite(norm) == (step != BAD_STEP)
            if torch.isfinite(norm):
                optimizer.step()
        return whole_state(model)

    expected = skip(False)
    for state in run(skip, True):
        assert_same(state, expected)


def test_ranks_that_scale_differently_are_told() -> None:
    def scale() -> None:
        model, optimizer = wrapped("zero2")
        scaler = GradScaler("cpu", init_scale=8.0 if shoal.world().rank == 1 else 16.0)
        x, y = local(0)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        with pytest.raises(MismatchError, match="between 8 and 16"):
            scaler.unscale_(optimizer)

    run(scale)


def test_unscaling_twice_is_an_error_as_ever() -> None:
    def unscale() -> None:
        model, optimizer = wrapped("zero2")
        scaler = GradScaler("cpu", **SETTINGS)
        x, y = local(0)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)

    run(unscale)


def test_half_precision_parameters_are_refused() -> None:
    def unscale() -> None:
        module = OddMLP().half()
        model, optimizer = shoal.as_distributed(module, momentum(module), strategy="zero2")
        scaler = GradScaler("cpu", **SETTINGS)
        scaler.scale(model(torch.ones(2, 7).half()).sum().float()).backward()
        with pytest.raises(ValueError, match="FP16"):
            scaler.unscale_(optimizer)

    run(unscale)


def test_a_disabled_scaler_does_nothing() -> None:
    def train_unscaled() -> State:
        model, optimizer = wrapped("zero2")
        scaler = GradScaler("cpu", enabled=False)
        x, y = local(0)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        take_step(model, [optimizer], scaler, "model")
        return whole_state(model)

    model = seeded()
    F.mse_loss(model(data(0)[0]), data(0)[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    momentum(model).step()
    for state in run(train_unscaled):
        assert_same(state, whole_state(model))


def test_optimizers_that_are_not_wrapped_work_as_with_torch() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler("cpu", **SETTINGS)
    scaler.scale((parameter * 2).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.zeros(2))


assert RANKS > BAD_RANK

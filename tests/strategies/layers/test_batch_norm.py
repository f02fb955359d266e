"""Synchronized BatchNorm: many ranks train as one process on the whole batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pools
import shoal
from shoal.errors import DeadlockError, MismatchError, PeerError, ShoalError
from shoal.strategies.data_parallel import DDPModel
from strategies.loops import (
    RANKS,
    State,
    assert_same,
    distinct,
    each,
    momentum,
    run,
    seeded,
    whole_state,
)
from strategies.models import ResNet, random_numbers

# Rows of each rank: one that could not even compute a variance, and a rank without any.
UNEVEN = (1, 4, 2)
STEPS = 4


class Convolutional(nn.Module):
    """BatchNorm in all dimensions, one of them used twice, behind layers that get gradients."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.conv_3 = nn.Conv3d(2, 3, 2)
        self.norm_3 = nn.BatchNorm3d(3, **settings)
        self.conv_2 = nn.Conv2d(3, 4, 2)
        self.norm_2 = nn.BatchNorm2d(4, **settings)
        self.norm_1 = nn.BatchNorm1d(4, **settings)
        self.head = nn.Linear(4, 3)
        self.last = nn.BatchNorm1d(3, **settings)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm_3(self.conv_3(x))).mean(-1)
        x = torch.tanh(self.norm_2(self.conv_2(x))).mean(-1)
        x = torch.tanh(self.norm_1(torch.tanh(self.norm_1(x)))).mean(-1)
        return self.last(self.head(x))


def volumes(step: int) -> tuple[Tensor, Tensor]:
    items = sum(UNEVEN)
    return random_numbers(step, items, 2, 4, 4, 3), random_numbers(step, items, 3)


def rows_of(step: int, sizes: tuple[int, ...]) -> list[Tensor]:
    rank = shoal.world().rank
    return [tensor.split(list(sizes))[rank] for tensor in volumes(step)]


def train(
    build: Callable[[], nn.Module], strategy: str | None, sizes: tuple[int, ...] = UNEVEN
) -> State:
    """``sizes`` are the ranks' rows; None for a strategy: one process."""
    model: Any = seeded(build)
    optimizer: Any = momentum(model)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=300, sync_batchnorm=True
        )
    for step in range(STEPS):
        optimizer.zero_grad()
        if strategy is None:
            x, y = volumes(step)
            F.mse_loss(model(x), y).backward()
        else:
            model.train_step(*rows_of(step, sizes), F.mse_loss)
        optimizer.step()
    return whole_state(model)


@each
def test_rows_of_different_number_train_as_one_process(strategy: str) -> None:
    expected = train(Convolutional, None)
    for state in run(train, Convolutional, strategy):
        assert_same(state, expected)
    assert expected["last.num_batches_tracked"] == STEPS
    assert expected["norm_1.num_batches_tracked"] == 2 * STEPS


SETTINGS: dict[str, dict[str, Any]] = {
    "cumulative average": {"momentum": None},
    "no affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "large eps and momentum": {"eps": 0.5, "momentum": 0.9},
}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_every_setting(strategy: str, settings: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return Convolutional(**settings)

    expected = train(build, None)
    for state in run(train, build, strategy):
        assert_same(state, expected)


@distinct
def test_a_rank_without_rows_takes_part(strategy: str) -> None:
    expected = train(Convolutional, None)
    for state in run(train, Convolutional, strategy, (3, 0, 4)):
        assert_same(state, expected)


def train_over_processes() -> State:
    state = train(Convolutional, "zero3", (2, 5))
    gc.collect()  # it holds groups, and they connections
    return state


def test_over_shared_memory() -> None:
    for state in pools.Team("shm", 2).run(train_over_processes):
        assert_same(state, train(Convolutional, None))


def build_for_verify() -> Any:
    torch.manual_seed(0)
    model = ResNet().double()
    batches = [
        (random_numbers(step, 7, 3, 6, 6), torch.arange(7).remainder(3)) for step in range(3)
    ]
    return model, momentum(model), batches, F.cross_entropy


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_verify_finds_it_equal_to_the_whole_batch(strategy: str) -> None:
    report = shoal.verify(build_for_verify, strategy, ranks=RANKS, steps=3, sync_batchnorm=True)
    assert report.equal, str(report)
    without = shoal.verify(build_for_verify, strategy, ranks=RANKS, steps=3)
    assert not without.equal


# One layer, and its gradient -----------------------------------------------------------------


def places_of(rank: int) -> Tensor:
    """Images whose size depends on the rank."""
    return random_numbers(rank, rank + 1, 3, 2 + rank, 5)


def one_layer() -> tuple[Tensor, Tensor, State]:
    """Output and gradient of this rank's input, as rows."""
    rank = shoal.world().rank
    model = DDPModel(nn.BatchNorm2d(3).double(), sync_batchnorm=True)
    x = places_of(rank).requires_grad_()
    y = model(x)
    (y.tanh() * y).sum().backward()
    assert x.grad is not None
    return as_rows(y.detach()), as_rows(x.grad), whole_state(model)


def as_rows(images: Tensor) -> Tensor:
    return images.movedim(1, -1).flatten(0, -2)


def test_images_of_different_size() -> None:
    x = torch.cat([as_rows(places_of(rank)) for rank in range(RANKS)]).requires_grad_()
    model = nn.BatchNorm1d(3).double()
    y = model(x)
    (y.tanh() * y).sum().backward()
    found = run(one_layer)
    assert torch.allclose(torch.cat([output for output, _, _ in found]), y, rtol=0, atol=1e-12)
    gradient = torch.cat([gradient for _, gradient, _ in found])
    assert x.grad is not None
    assert torch.allclose(gradient, x.grad, rtol=0, atol=1e-12)
    for _, _, state in found:
        assert_same(state, model.state_dict(), 1e-12)


def test_values_far_from_zero_keep_their_variance() -> None:
    def normalize() -> Tensor:
        model = DDPModel(nn.BatchNorm1d(2), sync_batchnorm=True)
        return model(10_000 + random_numbers(shoal.world().rank, 8, 2).float())

    x = torch.cat([10_000 + random_numbers(rank, 8, 2).float() for rank in range(RANKS)])
    expected = nn.BatchNorm1d(2).double()(x.double())
    assert torch.allclose(torch.cat(run(normalize)).double(), expected, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_come_back_as_they_went_in(dtype: torch.dtype) -> None:
    def normalize() -> Tensor:
        model = DDPModel(nn.BatchNorm1d(2), sync_batchnorm=True)
        y = model(100 * random_numbers(shoal.world().rank, 8, 2, dtype=dtype))
        y.sum().backward()
        return y

    x = torch.cat([100 * random_numbers(rank, 8, 2, dtype=dtype) for rank in range(RANKS)])
    expected = nn.BatchNorm1d(2)(x)
    y = torch.cat(run(normalize))
    assert y.dtype == expected.dtype == dtype
    assert torch.allclose(y.float(), expected.float(), atol=0.02)


class Recomputing(Convolutional):
    """Computes its first half again in backward, which updates running statistics twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._begin, x, use_reentrant=False)
        x = torch.tanh(self.norm_1(torch.tanh(self.norm_1(x)))).mean(-1)
        return self.last(self.head(x))

    def _begin(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm_3(self.conv_3(x))).mean(-1)
        return torch.tanh(self.norm_2(self.conv_2(x))).mean(-1)


@distinct
def test_recomputation(strategy: str) -> None:
    expected = train(Recomputing, None)
    assert expected["norm_3.num_batches_tracked"] == 2 * STEPS
    for state in run(train, Recomputing, strategy):
        assert_same(state, expected)


# What stays as it was ------------------------------------------------------------------------


def count_calls() -> int:
    return sum(counter.calls for counter in shoal.world().stats().values())


def test_evaluation_is_untouched() -> None:
    def evaluate() -> None:
        model: Any = DDPModel(seeded(Convolutional), sync_batchnorm=True)
        model.train_step(*rows_of(0, UNEVEN), F.mse_loss)
        model.eval()
        alone = seeded(Convolutional).eval()
        alone.load_state_dict(model.state_dict())
        before, calls = whole_state(model), count_calls()
        if shoal.world().rank == 1:  # nobody waits for the others
            x, _ = volumes(1)
            assert torch.allclose(model(x), alone(x), rtol=0, atol=1e-12)
            assert count_calls() == calls
        assert_same(whole_state(model), before, 0)

    run(evaluate)


def test_a_frozen_layer_among_training_ones() -> None:
    def freeze(is_wrapped: bool) -> State:
        model: Any = seeded(Convolutional)
        if is_wrapped:
            model = DDPModel(model, sync_batchnorm=True)
        model.norm_2.eval()
        x, _ = rows_of(0, UNEVEN) if is_wrapped else volumes(0)
        model(x)
        return whole_state(model)

    expected = freeze(False)
    assert expected["norm_2.num_batches_tracked"] == 0
    for state in run(freeze, True):
        assert_same(state, expected)


@distinct
def test_layers_stay_the_objects_they_are(strategy: str) -> None:
    def wrap() -> None:
        module = seeded(Convolutional)
        layers = [(name, id(layer)) for name, layer in module.named_modules()]
        tensors = [(name, id(tensor)) for name, tensor in module.named_parameters()]
        names = list(module.state_dict())
        model = shoal.as_distributed(module, strategy=strategy, sync_batchnorm=True)
        assert [(name, id(layer)) for name, layer in model.named_modules()] == layers
        assert [(name, id(tensor)) for name, tensor in model.named_parameters()] == tensors
        assert list(model.state_dict()) == names
        assert isinstance(model.norm_2, nn.BatchNorm2d)

    run(wrap)


def test_a_subclass_keeps_its_ways() -> None:
    class Strict(nn.BatchNorm1d):
        def _check_input_dim(self, input: Tensor) -> None:
            super()._check_input_dim(input)
            assert input.shape[1] == 3

    def normalize() -> None:
        model = DDPModel(Strict(3), sync_batchnorm=True)
        assert isinstance(model.module, Strict)
        model(torch.ones(2, 3))
        with pytest.raises(AssertionError):
            model(torch.ones(2, 4))

    run(normalize)


class Routed(nn.Module):
    """After layers that meet, each rank goes a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.ways = nn.ModuleList(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(RANKS)
        )

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](self.norm(self.entry(x)))


def route(strategy: str | None) -> State:
    model: Any = seeded(Routed)
    optimizer: Any = momentum(model)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=0, sync_batchnorm=True
        )
    for step in range(3):
        optimizer.zero_grad()
        x = random_numbers(step, 2 * RANKS, 5)
        if strategy is not None:
            rank = shoal.world().rank
            model(x.chunk(RANKS)[rank], rank).square().mean().backward()
        else:
            normal = model.norm(model.entry(x)).chunk(RANKS)
            losses = [
                way(rows).square().mean() for way, rows in zip(model.ways, normal, strict=True)
            ]
            torch.stack(losses).mean().backward()
        optimizer.step()
    return whole_state(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_ranks_that_part_behind_a_layer(strategy: str) -> None:
    """Nobody waits for a reduction that others only join after they have met in backward."""
    expected = route(None)
    for state in run(route, strategy):
        assert_same(state, expected)


def test_ranks_that_part_with_parameters_to_gather_are_told() -> None:
    """A rank that waits for statistics cannot help another to gather its parameters."""
    with pytest.raises((DeadlockError, PeerError)):
        run(route, "zero3")


# What is refused -----------------------------------------------------------------------------


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, None, None, training=True)


@pytest.mark.parametrize("layer", [OwnForward(3), nn.SyncBatchNorm(3)])
def test_a_layer_with_a_forward_of_its_own_is_refused(layer: nn.Module) -> None:
    def wrap() -> None:
        with pytest.raises(TypeError, match=r"cannot synchronize 0: .* forward of its own"):
            DDPModel(nn.Sequential(layer), sync_batchnorm=True)

    run(wrap)


def test_a_single_value_is_refused() -> None:
    def normalize() -> None:
        model = DDPModel(nn.BatchNorm1d(3), sync_batchnorm=True)
        x = torch.ones(1 if shoal.world().rank == 0 else 0, 3)
        with pytest.raises(ValueError, match="more than one value per channel"):
            model(x)

    run(normalize)


class Branches(nn.Module):
    """Two layers that are alike, either of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        return self.second(x if skip else self.first(x))


def test_a_rank_that_skips_a_layer_does_not_get_another_layers_numbers() -> None:
    def skip() -> None:
        model = DDPModel(Branches(), sync_batchnorm=True)
        model(torch.randn(4, 3), shoal.world().rank == 1)

    with pytest.raises((MismatchError, PeerError), match="BatchNorm 'first'"):
        run(skip)


def test_gradients_of_gradients_are_refused() -> None:
    def differentiate() -> None:
        model = DDPModel(nn.BatchNorm1d(3), sync_batchnorm=True)
        x = torch.randn(4, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    run(differentiate)


def test_the_option_counts_when_wrapping_again() -> None:
    def wrap() -> None:
        model = shoal.as_distributed(Branches(), strategy="ddp", sync_batchnorm=True)
        assert shoal.as_distributed(model, strategy="ddp", sync_batchnorm=True) is model
        with pytest.raises((ValueError, ShoalError), match="wrapped already"):
            shoal.as_distributed(model, strategy="ddp", sync_batchnorm=False)

    run(wrap)


def test_torch_s_synchronized_layers_are_refused_where_they_would_not_synchronize() -> None:
    def wrap() -> None:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
        shoal.as_distributed(module, strategy="ddp")

    with pytest.raises(TypeError, match="wrap with sync_batchnorm=True"):
        run(wrap, ranks=2)

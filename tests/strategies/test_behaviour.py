"""What a PyTorch user expects of a wrapped model and optimizer, under every strategy."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import MismatchError, ShoalError
from shoal.optim import DDPOptimizer, ShardedOptimizer, ZeRO2Optimizer, ZeRO3Optimizer
from shoal.strategies import DDPModel, ShardedModel, ZeRO2Model, ZeRO3Model
from strategies.models import GPT, Experts, OddMLP, ResNet, Twice, Unused, random_numbers
from strategies.training import STRATEGIES

pytestmark = pytest.mark.timeout(60)

RANKS = 3
each = pytest.mark.parametrize("strategy", STRATEGIES)
# FSDP differs from ZeRO-3 in its name; here the differences between strategies matter.
distinct = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
gathered = pytest.mark.parametrize("strategy", ["zero3", "fsdp"])

State = dict[str, Tensor]
BuildModule = Callable[[], nn.Module]


def run(fn: Callable[..., Any], *args: Any, ranks: int = RANKS) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


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
        if not model.sharding.optimizer:
            parts = parts[:1]  # every rank has all of it
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


# The plain loop and train_step --------------------------------------------------------------


def loop(strategy: str) -> State:
    model, optimizer = wrapped(strategy)
    for step in range(5):
        one_step(model, optimizer, local(step))
    return model.state_dict()


@each
def test_the_plain_loop(strategy: str) -> None:
    for state in run(loop, strategy):
        assert_same(state, one_process(range(5)))


def loop_of_train_step(strategy: str, sizes: Sequence[int]) -> tuple[State, list[Tensor]]:
    model, optimizer = wrapped(strategy)
    rank = shoal.world().rank
    losses = []
    for step in range(5):
        x, y = (tensor.split(list(sizes))[rank] for tensor in data(step))
        optimizer.zero_grad()
        losses.append(model.train_step(x, y, F.mse_loss))
        optimizer.step()
    assert not any(loss.requires_grad for loss in losses)
    return model.state_dict(), losses


@each
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 3), (5, 0, 1), (0, 6, 0)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_train_step_weights_batches_by_their_size(strategy: str, sizes: Sequence[int]) -> None:
    model = seeded()
    optimizer = momentum(model)
    expected = [one_step(model, optimizer, data(step)) for step in range(5)]
    for state, losses in run(loop_of_train_step, strategy, sizes):
        assert_same(state, whole_state(model))
        assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-12)


def weighted_train_step(strategy: str) -> tuple[Tensor, dict[str, Any]]:
    model, _ = wrapped(strategy)
    rank = shoal.world().rank
    loss = model.train_step(*local(0), F.mse_loss, weight=(0.0, 0.5, 1.5)[rank])
    return loss, full_gradients(model)


@distinct
def test_train_step_takes_weights(strategy: str) -> None:
    model = seeded()
    losses = [
        F.mse_loss(model(x), y)
        for x, y in zip(*(tensor.chunk(RANKS) for tensor in data(0)), strict=True)
    ]
    expected = 0.25 * losses[1] + 0.75 * losses[2]
    expected.backward()
    for loss, gradients in run(weighted_train_step, strategy):
        assert torch.allclose(loss, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


def train_step_twice(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy)
    for step in range(2):
        model.train_step(*local(step), F.mse_loss)
    return full_gradients(model)


@distinct
def test_train_step_neither_zeroes_nor_steps(strategy: str) -> None:
    model = seeded()
    for step in range(2):
        x, y = data(step)
        F.mse_loss(model(x), y).backward()
    for gradients in run(train_step_twice, strategy):
        assert_same_gradients(gradients, gradients_of(model))


class Named(nn.Module):
    """Takes its input by name, or a dict as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a: Any, b: Tensor | None = None) -> Tensor:
        if isinstance(a, dict):
            a, b = a["first"], a["second"]
        return self.layer(a if b is None else a + b)


def call_in_many_ways(strategy: str) -> list[Tensor]:
    model, _ = wrapped(strategy, Named)
    x, y = random_numbers(0, 4, 3), random_numbers(1, 4, 2)
    return [
        model.train_step(inputs, y, F.mse_loss)
        for inputs in ((x, x), {"a": x, "b": x}, {"first": x, "second": x}, x + x)
    ]


def test_train_step_calls_forward_as_documented() -> None:
    losses = run(call_in_many_ways, "zero3")[0]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


# When gradients are averaged ------------------------------------------------------------------


def accumulate(strategy: str) -> tuple[int, int, dict[str, Any]]:
    model, _ = wrapped(strategy)
    before = num_reductions()
    with model.no_sync():
        for step in (0, 1):
            x, y = local(step)
            F.mse_loss(model(x), y).backward()
    inside = num_reductions() - before
    x, y = local(2)
    F.mse_loss(model(x), y).backward()
    return inside, num_reductions() - before, full_gradients(model)


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


@each
def test_no_sync_reduces_nothing_and_loses_nothing(strategy: str) -> None:
    for inside, after, gradients in run(accumulate, strategy):
        assert inside == 0
        assert after > 0
        assert_same_gradients(gradients, one_process_gradients([0, 1, 2]))


def leave_no_sync_by_an_error(strategy: str) -> bool:
    model, _ = wrapped(strategy)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    before = num_reductions()
    model(local(0)[0]).sum().backward()
    return num_reductions() > before


def test_no_sync_ends_with_an_error_too() -> None:
    assert all(run(leave_no_sync_by_an_error, "zero2"))


def synchronize_by_hand(strategy: str) -> tuple[int, int, dict[str, Any]]:
    model, optimizer = wrapped(strategy, auto_sync=False)
    before = num_reductions()
    for step in (0, 1):
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
    without = num_reductions() - before
    model.synchronize_gradients()
    with_it = num_reductions() - before
    gradients = full_gradients(model)
    optimizer.step()
    return without, with_it, gradients


@each
def test_gradients_synchronized_by_hand(strategy: str) -> None:
    for without, with_it, gradients in run(synchronize_by_hand, strategy):
        assert without == 0
        assert with_it > 0
        assert_same_gradients(gradients, one_process_gradients([0, 1]))


def synchronize_twice(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy, auto_sync=False)
    x, y = local(0)
    F.mse_loss(model(x), y).backward()
    model.synchronize_gradients()
    model.synchronize_gradients()
    return full_gradients(model)


@distinct
def test_synchronizing_twice_is_synchronizing_once(strategy: str) -> None:
    for gradients in run(synchronize_twice, strategy):
        assert_same_gradients(gradients, one_process_gradients([0]))


def backward_twice(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy)
    for step in (0, 1):
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
    return full_gradients(model)


@each
def test_gradients_add_up_until_they_are_zeroed(strategy: str) -> None:
    for gradients in run(backward_twice, strategy):
        assert_same_gradients(gradients, one_process_gradients([0, 1]))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_whole_gradients_are_where_torch_has_them(strategy: str) -> None:
    def look() -> dict[str, Tensor]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    for gradients in run(look):
        assert_same_gradients(gradients, one_process_gradients([0]))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_change_to_a_gradient_counts(strategy: str) -> None:
    def train() -> State:
        model, optimizer = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        return model.state_dict()

    model = seeded()
    optimizer = momentum(model)
    x, y = data(0)
    (F.mse_loss(model(x), y) / 2).backward()
    optimizer.step()
    for state in run(train):
        assert_same(state, whole_state(model))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_gradient_that_is_elsewhere_says_so(strategy: str) -> None:
    def look() -> str:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        parameter = next(iter(model.parameters()))
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        with pytest.raises(ShoalError) as error:
            parameter.grad.norm()
        return str(error.value)

    assert all("gradient_shard" in text for text in run(look))


def set_gradients_to_none(strategy: str) -> dict[str, Any]:
    model, _ = wrapped(strategy)
    for step in (0, 1):
        for parameter in model.parameters():
            parameter.grad = None
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
    return full_gradients(model)


@distinct
def test_gradients_may_be_set_to_none_by_hand(strategy: str) -> None:
    for gradients in run(set_gradients_to_none, strategy):
        assert_same_gradients(gradients, one_process_gradients([1]))


@each
def test_gradient_shards_cover_everything_once(strategy: str) -> None:
    def look() -> tuple[dict[str, Any], dict[str, int]]:
        model, _ = wrapped(strategy)
        assert all(model.gradient_shard(name) is None for name, _ in model.named_parameters())
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        with pytest.raises(KeyError, match="no parameter named 'nobody'"):
            model.gradient_shard("nobody")
        sizes = {name: model.gradient_shard(name).numel() for name, _ in model.named_parameters()}
        return full_gradients(model), sizes

    found = run(look)
    numel = {name: value.numel() for name, value in seeded().named_parameters()}
    for name, count in numel.items():
        total = sum(sizes[name] for _, sizes in found)
        assert total == (count * RANKS if strategy == "ddp" else count)
    assert_same_gradients(found[0][0], one_process_gradients([0]))


# Clipping -----------------------------------------------------------------------------------


def clip(strategy: str, max_norm: float, norm_type: float) -> tuple[Tensor, dict[str, Any]]:
    model, _ = wrapped(strategy)
    x, y = local(0)
    F.mse_loss(model(x), y).backward()
    return model.clip_grad_norm_(max_norm, norm_type), full_gradients(model)


@each
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_by_norm(strategy: str, norm_type: float, max_norm: float) -> None:
    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    for norm, gradients in run(clip, strategy, max_norm, norm_type):
        assert torch.allclose(norm, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


@each
def test_clipping_by_value(strategy: str) -> None:
    def clip_value() -> dict[str, Any]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        model.clip_grad_value_(0.01)
        return full_gradients(model)

    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    for gradients in run(clip_value):
        assert_same_gradients(gradients, gradients_of(model))


@distinct
def test_clipping_when_there_are_no_gradients(strategy: str) -> None:
    def clip_nothing() -> float:
        model, _ = wrapped(strategy)
        model.clip_grad_value_(1.0)
        return model.clip_grad_norm_(1.0).item()

    assert run(clip_nothing) == [0.0] * RANKS


@distinct
def test_clipping_ignores_what_nobody_used(strategy: str) -> None:
    def clip_some() -> tuple[Tensor, dict[str, Any]]:
        model, _ = wrapped(strategy, Unused)
        x, y = local(0)
        F.mse_loss(model(x, False), y).backward()
        return model.clip_grad_norm_(0.01), full_gradients(model)

    model = seeded(Unused)
    x, y = data(0)
    F.mse_loss(model(x, False), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for norm, gradients in run(clip_some):
        assert torch.allclose(norm, expected, rtol=1e-12)
        assert_same_gradients(gradients, gradients_of(model))


@each
def test_torch_s_own_clipping_is_right_or_refused(strategy: str) -> None:
    def clip_by_torch() -> tuple[Tensor | None, dict[str, Any]]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        norm = None
        with contextlib.suppress(ShoalError):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return norm, full_gradients(model)

    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    untouched = copy.deepcopy(gradients_of(model))
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for norm, gradients in run(clip_by_torch):
        assert (norm is None) == (strategy in ("zero2", "zero3", "fsdp"))
        if norm is not None:
            assert torch.allclose(norm, expected, rtol=1e-12)
        assert_same_gradients(gradients, untouched if norm is None else gradients_of(model))


# Optimizers ---------------------------------------------------------------------------------

Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)],
        [3],
    ),
}


def train_with_schedule(strategy: str | None, when: str, name: str) -> tuple[State, list[float]]:
    model: Any = seeded()
    optimizer: Any = momentum(model)
    scheduler = SCHEDULES[name](optimizer) if when == "before" else None
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    scheduler = scheduler or SCHEDULES[name](optimizer)
    rates = []
    for step in range(6):
        one_step(model, optimizer, data(step) if strategy is None else local(step))
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return whole_state(model), rates


@distinct
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedulers_built_before_and_after_wrapping(strategy: str, when: str, name: str) -> None:
    expected, rates = train_with_schedule(None, when, name)
    assert len(set(rates)) > 2
    for state, found in run(train_with_schedule, strategy, when, name):
        assert_same(state, expected)
        assert found == rates


def test_a_schedule_by_the_loss() -> None:
    def train() -> list[float]:
        model, optimizer = wrapped("zero2")
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for loss in (3.0, 2.0, 2.5, 2.6):
            one_step(model, optimizer, local(0))
            scheduler.step(loss)
        return [group["lr"] for group in optimizer.param_groups]

    assert run(train) == [[0.025]] * RANKS


def train_groups(strategy: str | None) -> State:
    model: Any = seeded()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer: Any = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        eps=1e-3,
    )
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    assert len(optimizer.param_groups) == 2
    for step in range(8):
        if step == 4:
            optimizer.param_groups[0]["lr"] = 0.05
            optimizer.param_groups[1]["betas"] = (0.5, 0.9)
        one_step(model, optimizer, data(step) if strategy is None else local(step))
    return whole_state(model)


@each
def test_groups_of_parameters_and_changes_to_them(strategy: str) -> None:
    expected = train_groups(None)
    for state in run(train_groups, strategy):
        assert_same(state, expected)


def train_part(strategy: str | None) -> State:
    """Only the first layer has an optimizer, though all of them get gradients."""
    model: Any = seeded()
    optimizer: Any = momentum(model.layers[0])
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=1 << 20
        )
    for step in range(4):
        one_step(model, optimizer, data(step) if strategy is None else local(step))
        model.zero_grad()
    return whole_state(model)


@each
def test_parameters_without_an_optimizer_stay(strategy: str) -> None:
    expected = train_part(None)
    for state in run(train_part, strategy):
        assert_same(state, expected)


@distinct
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_list_of_optimizers_in_any_order(strategy: str, order: tuple[int, int]) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        both = [
            torch.optim.Adafactor(matrices, lr=0.01),
            torch.optim.AdamW(others, lr=0.01, eps=1e-3),
        ]
        return [both[index] for index in order]

    def train() -> State:
        module = seeded()
        model, both = shoal.as_distributed(module, optimizers(module), strategy=strategy)
        assert isinstance(both, list)
        for step in range(4):
            x, y = (tensor[:2] for tensor in data(step))  # the same on all ranks: exact
            F.mse_loss(model(x), y).backward()
            for optimizer in both:
                optimizer.step()
            model.zero_grad()
        return model.state_dict()

    model = seeded()
    both = optimizers(model)
    for step in range(4):
        x, y = (tensor[:2] for tensor in data(step))
        F.mse_loss(model(x), y).backward()
        for optimizer in both:
            optimizer.step()
        model.zero_grad()
    for state in run(train):
        assert_same(state, whole_state(model))


def step_by_closure(strategy: str | None) -> tuple[State, list[float]]:
    model: Any = seeded()
    optimizer: Any = momentum(model)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    losses = []
    for step in range(4):
        x, y = data(step) if strategy is None else local(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return whole_state(model), losses


@each
def test_closures(strategy: str) -> None:
    expected, expected_losses = step_by_closure(None)
    for state, losses in run(step_by_closure, strategy):
        assert_same(state, expected)
        assert losses == pytest.approx(expected_losses, rel=1e-12)


def lbfgs_with_line_search(strategy: str | None) -> State:
    model: Any = seeded()
    optimizer: Any = torch.optim.LBFGS(
        model.parameters(), max_iter=4, line_search_fn="strong_wolfe"
    )
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    x, y = data(0) if strategy is None else local(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return whole_state(model)


@each
@pytest.mark.filterwarnings("ignore:.*may couple any of its parameters")
def test_lbfgs_with_a_line_search(strategy: str) -> None:
    expected = lbfgs_with_line_search(None)
    for state in run(lbfgs_with_line_search, strategy):
        assert_same(state, expected, 1e-8)


def test_an_optimizer_that_couples_parameters_warns_where_memory_is_expected() -> None:
    def wrap(strategy: str) -> None:
        module = seeded()
        optimizer = torch.optim.LBFGS(module.parameters())
        shoal.as_distributed(module, optimizer, strategy=strategy)

    run(wrap, "ddp")
    with pytest.warns(UserWarning, match="LBFGS may couple any of its parameters"):
        run(wrap, "zero2")


@each
def test_an_optimizer_built_after_wrapping(strategy: str) -> None:
    def train() -> State:
        model = shoal.as_distributed(seeded(), strategy=strategy)
        same, optimizer = shoal.as_distributed(model, momentum(model), strategy=strategy)
        assert same is model
        for step in range(3):
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(train):
        assert_same(state, one_process(range(3)))


@each
def test_an_optimizer_that_has_stepped_before(strategy: str) -> None:
    def train() -> State:
        module: Any = seeded()
        plain: Any = momentum(module)
        for step in (0, 1):
            one_step(module, plain, data(step))
        model, optimizer = shoal.as_distributed(module, plain, strategy=strategy)
        for step in (2, 3):
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(train):
        assert_same(state, one_process(range(4)))


@distinct
def test_an_optimizer_that_was_not_wrapped_is_right_or_refused(strategy: str) -> None:
    def train() -> State | None:
        model = shoal.as_distributed(seeded(), strategy=strategy)
        optimizer = momentum(model)
        for step in range(3):
            try:
                one_step(model, optimizer, local(step))
            except ShoalError:
                return None
        return model.state_dict()

    for state in run(train):
        if state is None:
            assert strategy in ("zero2", "zero3")
        else:
            assert_same(state, one_process(range(3)))


def test_the_user_s_optimizer_survives() -> None:
    def look() -> None:
        module = seeded()
        plain = torch.optim.AdamW(module.parameters(), lr=0.123)
        model, optimizer = shoal.as_distributed(module, plain, strategy="zero3")
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer, ZeRO3Optimizer)
        assert optimizer.optimizer is plain
        assert optimizer.param_groups is plain.param_groups
        assert optimizer.param_groups[0]["lr"] == 0.123
        assert optimizer.defaults["betas"] == (0.9, 0.999)
        plain.param_groups[0]["lr"] = 0.5
        assert optimizer.param_groups[0]["lr"] == 0.5
        one_step(model, optimizer, local(0))
        assert optimizer.state

    run(look)


def test_adding_a_group_later_is_right_or_refused() -> None:
    def train() -> State | None:
        module = seeded()
        plain = momentum(module.layers[0])
        model, optimizer = shoal.as_distributed(module, plain, strategy="zero3")
        try:
            optimizer.add_param_group({"params": list(module.layers[1].parameters())})
        except (ValueError, ShoalError, NotImplementedError):
            return None
        for step in range(3):
            one_step(model, optimizer, local(step))
        return model.state_dict()

    model = seeded()
    optimizer = momentum(model.layers[0])
    optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    for step in range(3):
        one_step(model, optimizer, data(step))
    for state in run(train):
        if state is not None:
            assert_same(state, whole_state(model))


# Frozen and unused parameters ---------------------------------------------------------------


def freeze_and_unfreeze(strategy: str | None) -> tuple[State, list[bool]]:
    model: Any = seeded()
    model.layers[0].requires_grad_(False)
    optimizer: Any = momentum(model)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=300
        )
    has_gradient = []
    for step in range(9):
        if step == 3:
            model.layers[0].requires_grad_(True)
        if step == 6:
            model.layers[1].weight.requires_grad_(False)
        one_step(model, optimizer, data(step) if strategy is None else local(step))
        has_gradient.append([p.grad is not None for p in model.parameters()])
    return whole_state(model), has_gradient


@each
def test_frozen_then_unfrozen_then_frozen(strategy: str) -> None:
    expected, has_gradient = freeze_and_unfreeze(None)
    for state, found in run(freeze_and_unfreeze, strategy):
        assert_same(state, expected)
        assert found == has_gradient


def use_some(strategy: str | None) -> tuple[State, list[Any]]:
    model: Any = seeded(Unused)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3, weight_decay=0.5)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=1 << 20
        )
    seen = []
    for step, use in enumerate((False, True, True, False, True)):
        optimizer.zero_grad()
        x, y = data(step) if strategy is None else local(step)
        F.mse_loss(model(x, use), y).backward()
        seen.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    return whole_state(model), seen


@each
def test_unused_parameters_have_no_gradient_and_are_not_stepped(strategy: str) -> None:
    expected, expected_seen = use_some(None)
    assert torch.equal(expected["never.weight"], seeded(Unused).never.weight)
    for state, seen in run(use_some, strategy):
        assert_same(state, expected)
        assert seen == expected_seen


def use_different_experts(strategy: str | None, num_ranks: int) -> tuple[State, list[Any]]:
    """Rank r uses the experts r and r + 1; the order of use differs as well."""
    model: Any = seeded(Experts)
    optimizer: Any = momentum(model)
    ranks: Sequence[int] = range(num_ranks)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=100
        )
        ranks = [shoal.world().rank]
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = data(10 * step + rank, items=4, inputs=5, outputs=2)
            route = torch.tensor([rank, rank + step, rank, rank]) % 3
            loss = F.mse_loss(model(x, route), y)
            (loss if strategy else loss / num_ranks).backward()
        seen.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    return whole_state(model), seen


@each
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_use_different_experts_do_not_hang(strategy: str, ranks: int) -> None:
    expected, expected_seen = use_different_experts(None, ranks)
    for state, seen in run(use_different_experts, strategy, ranks, ranks=ranks):
        assert_same(state, expected)
        assert seen == expected_seen


class Backwards(nn.Module):
    """Uses its layers in an order that the input chooses, some of them several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


ORDERS = [
    [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 5, 0, 5, 0]],
    [[3], [1, 2, 1, 2, 1, 2, 4], [5, 0]],
    [[0, 0, 0], [2, 1], [4, 4, 5, 1, 0, 2, 3, 5]],
]


def use_in_any_order(strategy: str | None) -> State:
    model: Any = seeded(Backwards)
    optimizer: Any = momentum(model)
    ranks: Sequence[int] = range(RANKS)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=0
        )
        ranks = [shoal.world().rank]
    for step in range(6):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = data(10 * step + rank, items=2, inputs=5, outputs=5)
            loss = F.mse_loss(model(x, ORDERS[step % 3][rank]), y)
            (loss if strategy else loss / RANKS).backward()
        optimizer.step()
    return whole_state(model)


@each
def test_ranks_that_use_layers_in_different_orders(strategy: str) -> None:
    expected = use_in_any_order(None)
    for state in run(use_in_any_order, strategy):
        assert_same(state, expected)


def one_rank_uses_nothing(strategy: str) -> dict[str, Any]:
    """Rank 1's loss does not depend on the model; it still takes part."""
    model, _ = wrapped(strategy)
    x, y = local(0)
    loss = F.mse_loss(model(x), y)
    if shoal.world().rank == 1:
        loss = loss * 0
    loss.backward()
    return full_gradients(model)


@distinct
def test_a_rank_with_a_loss_of_zero(strategy: str) -> None:
    model = seeded()
    for rank in (0, 2):
        x, y = (tensor.chunk(RANKS)[rank] for tensor in data(0))
        (F.mse_loss(model(x), y) / RANKS).backward()
    for gradients in run(one_rank_uses_nothing, strategy):
        assert_same_gradients(gradients, gradients_of(model))


# Graphs that are not one forward and one backward -------------------------------------------


def compare_gradients(
    strategy: str, loss_of: Callable[[Any, Tensor], Tensor], make: BuildModule = OddMLP
) -> None:
    """``loss_of`` makes a mean over the items and may call backward itself."""

    def on_rank() -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = wrapped(strategy, make)
        x, _ = local(0)
        loss_of(model, x).backward()
        first = full_gradients(model)
        optimizer.zero_grad()
        loss_of(model, x).backward()  # and nothing is left over from the first time
        return first, full_gradients(model)

    model = seeded(make)
    loss_of(model, data(0)[0]).backward()
    for first, second in run(on_rank):
        assert_same_gradients(first, gradients_of(model))
        assert_same_gradients(second, gradients_of(model))


def several_forwards(model: Any, x: Tensor) -> Tensor:
    first, second = model(x), model(x * 2)
    return (first * second + model(x - 1)).square().mean()


def several_backwards(model: Any, x: Tensor) -> Tensor:
    first, second = model(x).square().mean(), model(x * 2).square().mean()
    first.backward()
    return second


def backwards_in_the_other_order(model: Any, x: Tensor) -> Tensor:
    first, second = model(x).square().mean(), model(x * 2).square().mean()
    second.backward()
    return first


def retained_graph(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return loss


def forward_without_backward(model: Any, x: Tensor) -> Tensor:
    model(x + 3)
    return model(x).square().mean()


def forward_of_the_output(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    return model(torch.cat([out, out, x[:, :1]], 1)).square().mean()


def gradient_of_the_input(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    return model(x.detach() + gradient).square().mean()


def detached_part(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    return (out * out.detach()).mean()


def under_no_grad_between(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    with torch.no_grad():
        target = model(x + 1)
    return F.mse_loss(out, target)


GRAPHS = [
    several_forwards,
    several_backwards,
    backwards_in_the_other_order,
    retained_graph,
    forward_without_backward,
    forward_of_the_output,
    gradient_of_the_input,
    detached_part,
    under_no_grad_between,
]


@distinct
@pytest.mark.parametrize("loss_of", GRAPHS, ids=lambda f: f.__name__)
def test_graphs_of_many_kinds(strategy: str, loss_of: Callable[[Any, Tensor], Tensor]) -> None:
    compare_gradients(strategy, loss_of)


@distinct
def test_a_module_used_twice_in_one_forward(strategy: str) -> None:
    compare_gradients(strategy, lambda model, x: model(x).square().mean(), Twice)


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


@distinct
def test_a_gradient_of_a_gradient(strategy: str) -> None:
    compare_gradients(strategy, gradient_penalty)


class Recomputing(nn.Module):
    """Drops the activations of two of its three parts, and computes them again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:
            x = x.requires_grad_()
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x


class RecomputingEverything(Recomputing):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return x


@distinct
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [Recomputing, RecomputingEverything])
def test_activation_checkpointing(
    strategy: str, use_reentrant: bool, kind: type[Recomputing]
) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        return model(x.clone()).square().mean()

    compare_gradients(strategy, loss_of, lambda: kind(use_reentrant))


class ReturnsParts(nn.Module):
    """Several outputs, of which the loss uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(7, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.body(x))
        return {"both": (self.left(x), [self.right(x)]), "none": None}


@distinct
def test_outputs_that_the_loss_does_not_use(strategy: str) -> None:
    compare_gradients(strategy, lambda model, x: model(x)["both"][0].square().mean(), ReturnsParts)
    compare_gradients(
        strategy, lambda model, x: model(x)["both"][1][0].square().mean(), ReturnsParts
    )


@distinct
def test_two_models_in_one_world(strategy: str) -> None:
    """A generator and a discriminator, stepped in turns."""

    def losses(generator: Any, discriminator: Any, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        fake = generator(x)
        yield F.mse_loss(discriminator(fake.detach().repeat(1, 2)[:, :5]), y)
        yield -discriminator(fake.repeat(1, 2)[:, :5]).square().mean()

    def train(is_wrapped: bool) -> tuple[State, State]:
        torch.manual_seed(0)
        models: Any = [OddMLP().double(), OddMLP((5, 11, 3)).double()]
        optimizers: Any = [momentum(model) for model in models]
        if is_wrapped:
            pairs = [
                shoal.as_distributed(*pair, strategy=strategy, min_group_bytes=300)
                for pair in zip(models, optimizers, strict=True)
            ]
            models, optimizers = zip(*pairs, strict=True)
        for step in range(4):
            x, y = local(step) if is_wrapped else data(step)
            for which, loss in enumerate(losses(*models, x, y)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                optimizers[1 - which].step()
        return whole_state(models[0]), whole_state(models[1])

    expected = train(False)
    for found in run(train, True):
        for state, reference in zip(found, expected, strict=True):
            assert_same(state, reference)


# Hooks of the user's ------------------------------------------------------------------------


def count_hooks(strategy: str | None, when: str) -> tuple[list[str], Any]:
    model: Any = seeded()
    calls: list[str] = []

    def install(model: Any) -> None:
        model.layers[1].register_forward_hook(lambda *_: calls.append("forward"))
        model.layers[1].register_full_backward_hook(lambda *_: calls.append("backward"))
        model.layers[1].weight.register_hook(lambda g: calls.append(f"{tuple(g.shape)}") or 2 * g)
        model.layers[0].bias.register_hook(lambda g: 0 * g)

    if when == "before":
        install(model)
    if strategy is not None:
        model = shoal.as_distributed(model, strategy=strategy, min_group_bytes=300)
    if when == "after":
        install(model)
    x, y = data(0) if strategy is None else local(0)
    F.mse_loss(model(x), y).backward()
    return calls, gradients_of(model) if strategy is None else full_gradients(model)


@distinct
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_s(strategy: str, when: str) -> None:
    expected_calls, expected = count_hooks(None, when)
    for calls, gradients in run(count_hooks, strategy, when):
        assert sorted(calls) == sorted(expected_calls)
        assert_same_gradients(gradients, expected)


# Evaluation ---------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [OddMLP, ResNet, GPT])
def test_evaluation_between_steps(strategy: str, mode: Any, make: BuildModule) -> None:
    def inputs() -> Tensor:
        if make is GPT:
            return torch.arange(12).view(2, 6)
        return random_numbers(0, 2, 3, 6, 6) if make is ResNet else data(0)[0][:2]

    def train(is_wrapped: bool) -> tuple[list[Tensor], State]:
        model: Any = seeded(make)
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy=strategy, min_group_bytes=300
            )
        answers = []
        for _ in range(3):
            model.eval()
            assert not model.training
            with mode():
                answers.append(model(inputs()).clone())
            model.train()
            assert model.training
            optimizer.zero_grad()
            model(inputs()).square().mean().backward()
            optimizer.step()
        return answers, whole_state(model)

    expected, expected_state = train(False)
    for answers, state in run(train, True):
        assert_same(state, expected_state)
        for answer, reference in zip(answers, expected, strict=True):
            assert torch.allclose(answer, reference, rtol=0, atol=1e-10)


def num_gathers() -> int:
    counters = shoal.world().stats()
    return counters["all_gather"].calls if "all_gather" in counters else 0


@gathered
def test_repeated_predictions_gather_once(strategy: str) -> None:
    def predict() -> list[int]:
        model, _ = wrapped(strategy)
        x, _ = local(0)
        counts = []
        with model.predicting():
            for _ in range(3):
                before = num_gathers()
                assert not model(x).requires_grad
                counts.append(num_gathers() - before)
        before = num_gathers()
        model(x)
        counts.append(num_gathers() - before)
        assert num_present(model) == 0
        return counts

    for first, second, third, outside in run(predict):
        assert first > 0
        assert second == third == 0
        assert outside > 0


def num_present(model: Any) -> int:
    return sum(group.is_sharded and group.is_present for group in model.engine.groups)


@each
def test_predictions_see_what_training_has_changed(strategy: str) -> None:
    def train() -> list[Tensor]:
        model, optimizer = wrapped(strategy)
        x, _ = data(5)
        answers = []
        with model.predicting():
            answers.append(model(x))
        one_step(model, optimizer, local(0))
        with model.predicting():
            answers.append(model(x))
            with torch.enable_grad():
                one_step(model, optimizer, local(1))  # training inside the block
            answers.append(model(x))
        return answers

    model = seeded()
    optimizer = momentum(model)
    expected = [model(data(5)[0]).detach()]
    for step in (0, 1):
        one_step(model, optimizer, data(step))
        expected.append(model(data(5)[0]).detach())
    for answers in run(train):
        for answer, reference in zip(answers, expected, strict=True):
            assert torch.allclose(answer, reference, rtol=0, atol=1e-10)


def test_memory_is_bounded_without_a_predicting_block() -> None:
    def predict() -> list[int]:
        model, _ = wrapped("zero3")
        found = []
        for _ in range(3):
            with torch.no_grad():
                model(local(0)[0])
            found.append(num_present(model))
        return found

    assert run(predict) == [[0, 0, 0]] * RANKS


# Parameters and state -----------------------------------------------------------------------


@each
def test_names_shapes_and_attributes_are_the_module_s_own(strategy: str) -> None:
    def look() -> None:
        module: Any = seeded(GPT)
        names = [name for name, _ in module.named_parameters()]
        shapes = [p.shape for p in module.parameters()]
        count = sum(p.numel() for p in module.parameters())
        module.note = "mine"
        model: Any = shoal.as_distributed(module, strategy=strategy, min_group_bytes=300)
        assert isinstance(model, nn.Module)
        assert isinstance(model, ShardedModel)
        assert [name for name, _ in model.named_parameters()] == names
        assert [p.shape for p in model.parameters()] == shapes
        assert sum(p.numel() for p in model.parameters()) == count
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert [name for name, _ in model.named_modules()] == [
            name for name, _ in module.named_modules()
        ]
        assert model.note == "mine"
        assert model.head.weight is model.embedding.weight
        assert model.get_parameter("norm.weight") is module.norm.weight
        assert model.module is module
        assert len(model.blocks) == 2
        with pytest.raises(AttributeError):
            _ = model.nobody
        assert "GPT" in repr(model)

    run(look)


@each
def test_the_original_module_stays_callable(strategy: str) -> None:
    def call() -> None:
        model, _ = wrapped(strategy)
        x, _ = data(0)
        expected = seeded()(x)
        for way in (model, model.module, model.forward):
            assert torch.allclose(way(x), expected, rtol=0, atol=1e-12)
        first = model.layers[0](x)  # a part of it, by itself
        assert torch.allclose(first, seeded().layers[0](x), rtol=0, atol=1e-12)

    run(call)


@each
def test_ranks_start_from_rank_0_s_weights(strategy: str) -> None:
    def look() -> State:
        torch.manual_seed(shoal.world().rank)
        module = ResNet().double()
        for buffer in module.buffers():
            buffer.fill_(shoal.world().rank + 1)
        return shoal.as_distributed(module, strategy=strategy).state_dict()

    torch.manual_seed(0)
    expected = ResNet().double()
    for buffer in expected.buffers():
        buffer.fill_(1)
    for state in run(look):
        assert_same(state, whole_state(expected), 0.0)


@each
def test_full_parameters_are_whole_and_changes_are_kept(strategy: str) -> None:
    def change() -> State:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        with model.full_parameters():
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        assert_same(found, one_process([0]))
        one_step(model, optimizer, local(1))
        return model.state_dict()

    model = seeded()
    optimizer = momentum(model)
    one_step(model, optimizer, data(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    one_step(model, optimizer, data(1))
    for state in run(change):
        assert_same(state, whole_state(model))


@gathered
def test_full_parameters_may_be_nested_and_left_by_an_error(strategy: str) -> None:
    def nest() -> State:
        model, _ = wrapped(strategy)
        with model.full_parameters(), torch.no_grad():
            with model.full_parameters():
                model.layers[0].bias.fill_(3.0)
            assert model.layers[0].bias.eq(3.0).all()
            model(data(0)[0])
            model.layers[1].bias.fill_(4.0)
        with contextlib.suppress(KeyError), model.full_parameters():
            raise KeyError
        assert num_present(model) == 0
        return model.state_dict()

    for state in run(nest):
        assert state["layers.0.bias"].eq(3.0).all()
        assert state["layers.1.bias"].eq(4.0).all()


@each
def test_state_goes_out_and_in_under_plain_names(strategy: str) -> None:
    def exchange() -> None:
        model, optimizer = wrapped(strategy, GPT)
        tokens = torch.arange(12).view(2, 6)
        plain = seeded(GPT)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert_same(state, whole_state(plain), 0.0)
        assert model.full_state_dict().keys() == state.keys()
        # What was handed out is the user's: training does not change it.
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        assert_same(state, whole_state(plain), 0.0)
        # A plain model's state is loaded, and a plain model loads ours.
        other = seeded(GPT)
        other.load_state_dict({name: value + 0.25 for name, value in state.items()})
        result = model.load_state_dict(other.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.allclose(model(tokens), other(tokens), rtol=0, atol=1e-12)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(plain(tokens), other(tokens))

    run(exchange)


@distinct
def test_a_state_that_does_not_fit(strategy: str) -> None:
    def load() -> None:
        model, _ = wrapped(strategy)
        state = model.state_dict()
        short = {name: value for name, value in state.items() if name != "layers.0.bias"}
        with pytest.raises(RuntimeError, match=r"layers\.0\.bias"):
            model.load_state_dict(short)
        assert model.load_state_dict(short, strict=False).missing_keys == ["layers.0.bias"]
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, "layers.0.bias": torch.zeros(99)})
        assert_same(model.state_dict(), state, 0.0)

    run(load)


def test_state_of_buffers() -> None:
    def look() -> None:
        module = seeded(ResNet)
        module.register_buffer("scratch", torch.ones(3), persistent=False)
        model: Any = shoal.as_distributed(module, strategy="zero3")
        assert "scratch" not in model.state_dict()
        assert "stem.1.running_mean" in model.state_dict()
        assert "scratch" in dict(model.named_buffers())

    run(look)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "repr": repr,
    "str": str,
    "format": lambda p: f"{p.sum():.3f}",
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "numpy": lambda p: p.detach().numpy().copy(),
    "tolist": lambda p: p.tolist(),
    "index": lambda p: p[0].clone(),
    "iterate": lambda p: [row.sum().item() for row in p],
    "add": lambda p: p + 1,
    "add_to": lambda p: 1 + p,
    "matmul": lambda p: p.T @ p if p.dim() == 2 else p @ p,
    "stack": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.add(input=p, other=p),
    "compare": lambda p: (p == p).all(),
    "isnan": lambda p: p.isnan().any(),
    "type": lambda p: p.float(),
    "data_ptr": lambda p: p.data_ptr(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "hash": hash,
    "equal": lambda p: torch.equal(p, p.clone()),
    "allclose": lambda p: torch.allclose(p, p.data),
    "init": lambda p: nn.init.zeros_(p.data.clone()),
    "backward": lambda p: p.sum().backward(),
}


@gathered
@pytest.mark.parametrize("name", list(READS))
def test_any_parameter_can_be_read_outside_forward(strategy: str, name: str) -> None:
    def read() -> None:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        for parameter in model.parameters():
            READS[name](parameter)
        one_step(model, optimizer, local(1))  # and training goes on

    run(read)


@gathered
def test_what_is_read_outside_forward_is_right(strategy: str) -> None:
    def read() -> State:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        return {name: p + 0 for name, p in model.named_parameters()}

    expected = one_process([0])
    for found in run(read):
        assert_same({name: value.detach() for name, value in found.items()}, expected)


CRASH = """
import copy, torch, shoal
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))
    def forward(self, x):
        return self.second(self.first(x)) * self.scale, self.scale, self.first.weight.T

def main():
    model = shoal.as_distributed(Model(), strategy="zero3", min_group_bytes=100)
    x = torch.ones(3, 64)
    held = {held}
    for _ in range(3):
        model(x)[0].sum().backward()
    for tensor in held:
        try:
            float(tensor.sum()) + float(tensor[0].sum())
            repr(tensor)
        except (RuntimeError, shoal.errors.ShoalError):
            pass  # an error is fine: the process lives

if __name__ == "__main__":
    shoal.run(main, 2, "memory", timeout=20)
    print("alive")
"""


@pytest.mark.parametrize(
    "held",
    [
        "[p.data for p in model.parameters()]",
        "[p.detach() for p in model.parameters()]",
        "[p[0] for p in model.parameters()]",
        "[p.view(-1) for p in model.parameters()]",
        "model(x)",
        "list(model(x)[1:])",
        "list(model.module.state_dict().values())",
        "list(copy.copy(model.module.state_dict()).values())",
    ],
)
def test_nothing_handed_out_crashes_the_process_later(held: str) -> None:
    """What aliases a parameter that is freed: right, or an error; never a crash."""
    command = [sys.executable, "-c", CRASH.replace("{held}", held)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "alive"), result.stderr[-2000:]


def test_a_forward_that_fails_can_be_repaired() -> None:
    def train() -> State:
        model, optimizer = wrapped("zero3")
        for step in range(3):
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.ones(2, 99).double())
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(train):
        assert_same(state, one_process(range(3)))


def test_a_failure_in_one_rank_s_forward_reaches_the_others() -> None:
    def train() -> None:
        model, optimizer = wrapped("zero3")
        one_step(model, optimizer, local(0))
        x, y = local(1)
        if shoal.world().rank == 1:
            x = x[:, :2]
        one_step(model, optimizer, (x, y))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(train)


def test_a_dropped_model_is_freed() -> None:
    def drop() -> bool:
        model, optimizer = wrapped("zero3")
        one_step(model, optimizer, local(0))
        engine = weakref.ref(model.engine)
        del model, optimizer
        gc.collect()
        return engine() is None

    assert all(run(drop))


# Wrapping -----------------------------------------------------------------------------------


def test_disabled_gives_back_what_was_given() -> None:
    model = seeded()
    optimizer = momentum(model)
    assert shoal.as_distributed(model, enabled=False) is model
    assert shoal.as_distributed(model, optimizer, enabled=False) == (model, optimizer)
    with pytest.raises(shoal.errors.ClosedError):
        shoal.world()


def test_communication_is_started_where_nobody_has() -> None:
    script = """
import shoal, torch
m = torch.nn.Linear(3, 3)
m, o = shoal.as_distributed(m, torch.optim.SGD(m.parameters(), lr=0.1), strategy="zero3")
m(torch.ones(2, 3)).sum().backward(); o.step()
print(shoal.world().size)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "1"), result.stderr


def test_auto_replicates_small_models() -> None:
    def wrap() -> str:
        return shoal.as_distributed(seeded()).strategy

    assert run(wrap) == ["ddp"] * RANKS


def test_wrapping_again_with_the_same_options_changes_nothing() -> None:
    def wrap() -> None:
        module = seeded()
        first = shoal.as_distributed(
            module, momentum(module), strategy="zero2", min_group_bytes=300
        )
        second = shoal.as_distributed(*first, strategy="zero2", min_group_bytes=300)
        third = shoal.as_distributed(*first, strategy="auto")
        for again in (second, third):
            assert again[0] is first[0]
            assert again[1] is first[1]

    run(wrap)


def test_wrapping_again_with_other_options_is_an_error() -> None:
    def wrap() -> None:
        module = seeded()
        model, optimizer = shoal.as_distributed(module, momentum(module), strategy="zero2")
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="zero3")
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="zero2", min_group_bytes=5)
        with pytest.raises((TypeError, ValueError), match="wrapped already"):
            DDPModel(model)
        with pytest.raises((TypeError, ValueError), match="wrapped already"):
            ZeRO2Optimizer(optimizer, model)
        other = shoal.as_distributed(seeded(), strategy="zero2")
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(other, optimizer, strategy="zero2")

    run(wrap)


def test_a_module_that_is_inside_a_wrapped_model_cannot_be_wrapped_again() -> None:
    def wrap() -> None:
        module: Any = seeded()
        shoal.as_distributed(module, strategy="zero3")
        for again in (module, module.layers[0], nn.Sequential(module)):
            with pytest.raises((TypeError, ValueError), match="already"):
                shoal.as_distributed(again, strategy="zero3")

    run(wrap)


def test_an_optimizer_over_foreign_parameters_is_an_error() -> None:
    def wrap() -> None:
        module, other = seeded(), seeded()
        with pytest.raises(ValueError, match="not part of the model"):
            shoal.as_distributed(module, momentum(other), strategy="zero2")

    run(wrap)


@pytest.mark.parametrize("missing", [None, "adam", object(), []])
def test_something_that_is_no_optimizer(missing: Any) -> None:
    def wrap() -> None:
        model = ZeRO2Model(seeded())
        with pytest.raises(TypeError, match=r"need a torch\.optim\.Optimizer"):
            ZeRO2Optimizer(missing, model)

    run(wrap)


PAIRS = list(shoal.optim.PAIRS.items())


@pytest.mark.parametrize(("name", "classes"), PAIRS, ids=[name for name, _ in PAIRS])
def test_only_partners_go_together(name: str, classes: Any) -> None:
    def pair() -> list[str]:
        model_class, optimizer_class = classes
        fitting = []
        for other, (other_model_class, _) in PAIRS:
            module = seeded()
            model = other_model_class(module)
            optimizer = momentum(module)
            try:
                optimizer_class(optimizer, model)
                fitting.append(other)
            except TypeError as error:
                text = str(error)
                assert optimizer_class.__name__ in text
                assert model_class.__name__ in text
        return fitting

    expected = {"zero3": ["zero3", "fsdp"]}.get(name, [name])
    assert all(set(fitting) <= set(expected) and name in fitting for fitting in run(pair, ranks=2))


def test_classes_can_be_used_directly() -> None:
    def train() -> State:
        module = seeded()
        model = ZeRO3Model(module, shoal.world(), min_group_bytes=300)
        optimizer = ZeRO3Optimizer(momentum(module), model, kind="element-wise")
        for step in range(3):
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(train):
        assert_same(state, one_process(range(3)))


def test_classes_take_a_backend_or_the_current_world() -> None:
    def wrap() -> None:
        backend = shoal.world().backend
        group = backend.split(backend.rank % 2)
        model = DDPModel(seeded(), group)
        optimizer = DDPOptimizer(momentum(model), model)
        x = torch.full((2, 7), float(backend.rank)).double()
        model(x).sum().backward()
        optimizer.step()
        mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
        everybody = backend.all_gather_object(mine)
        assert torch.equal(everybody[0], everybody[2])
        assert not torch.equal(everybody[0], everybody[1])
        assert isinstance(DDPModel(seeded()), ShardedModel)

    run(wrap, ranks=4)


def test_unknown_names_are_refused() -> None:
    def wrap() -> None:
        with pytest.raises(ValueError, match="zero3"):
            shoal.as_distributed(seeded(), strategy="zero4")
        with pytest.raises(TypeError, match="no_such_option"):
            shoal.as_distributed(seeded(), strategy="zero3", no_such_option=1)

    run(wrap)


def test_moving_a_wrapped_model_is_refused() -> None:
    def move() -> None:
        model, _ = wrapped("zero3")
        for change in (lambda: model.half(), lambda: model.to("cpu", torch.float16)):
            with pytest.raises(ShoalError, match="before it is wrapped"):
                change()

    run(move)


# Ranks whose models differ --------------------------------------------------------------------

DIFFERENT: dict[str, BuildModule] = {
    "another shape": lambda: OddMLP((7, 12, 11, 3)),
    "another shape of the same size": lambda: OddMLP((7, 13, 11, 3)[::-1]),
    "one layer more": lambda: OddMLP((7, 13, 11, 3, 3)),
    "one layer less": lambda: OddMLP((7, 13, 11)),
    "another dtype": lambda: OddMLP().half(),
    "no parameters": nn.Sequential,
}


@distinct
@pytest.mark.parametrize("what", list(DIFFERENT))
def test_ranks_whose_models_differ_are_told(strategy: str, what: str) -> None:
    def wrap() -> None:
        is_odd = shoal.world().rank == 1
        module = DIFFERENT[what]() if is_odd else OddMLP()
        shoal.as_distributed(module, strategy=strategy)

    with pytest.raises((MismatchError, ValueError)):
        run(wrap)


def test_a_model_without_parameters() -> None:
    def train() -> None:
        model: Any = shoal.as_distributed(nn.Sequential(nn.ReLU()), strategy="zero3")
        assert model(torch.ones(2)).sum() == 2
        assert model.state_dict() == {}

    run(train)


@distinct
def test_empty_and_scalar_parameters(strategy: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.scalar = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scalar + self.empty.sum()

    def train(is_wrapped: bool) -> State:
        model: Any = seeded(Odd)
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        for step in range(3):
            one_step(model, optimizer, local(step) if is_wrapped else data(step))
        return whole_state(model)

    expected = train(False)
    for state in run(train, True):
        assert_same(state, expected)


@distinct
def test_parameters_that_are_not_contiguous(strategy: str) -> None:
    def transposed() -> nn.Module:
        model = OddMLP()
        first = model.layers[0]
        first.weight = nn.Parameter(first.weight.detach().T.contiguous().T)
        return model

    def train(is_wrapped: bool) -> State:
        model: Any = seeded(transposed)
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        for step in range(3):
            one_step(model, optimizer, local(step) if is_wrapped else data(step))
        return whole_state(model)

    expected = train(False)
    for state in run(train, True):
        assert_same(state, expected)


def test_the_optimizer_is_an_optimizer() -> None:
    def look() -> None:
        model, optimizer = wrapped("zero1")
        assert isinstance(optimizer, ShardedOptimizer)
        one_step(model, optimizer, local(0))
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        before = whole_state(model)
        one_step(model, optimizer, local(1))
        assert_same(whole_state(model), one_process([0, 1]))
        assert any(
            not torch.equal(before[name], value) for name, value in model.state_dict().items()
        )
        assert "SGD" in repr(optimizer)

    run(look)

"""The user's optimizer goes on working: schedulers, groups, closures, lists of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import shoal
from shoal.errors import ShoalError
from shoal.optim.data_parallel_optimizers import ZeRO3Optimizer
from strategies.loops import (
    RANKS,
    State,
    assert_same,
    data,
    distinct,
    each,
    local,
    momentum,
    one_process,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)

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
        own = optimizer.param_groups[0]["params"]
        assert list(map(id, own)) == list(map(id, module.parameters()))
        assert all(parameter.grad is not None for parameter in own)

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


def drop_a_group(optimizer: Any) -> None:
    del optimizer.param_groups[1]


def drop_a_parameter(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


def replace_a_list(optimizer: Any) -> None:
    optimizer.param_groups[1]["params"] = optimizer.param_groups[1]["params"][:1]


def add_a_parameter(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


def swap_groups(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


@distinct
@pytest.mark.parametrize(
    "change", [drop_a_group, drop_a_parameter, replace_a_list, add_a_parameter, swap_groups]
)
def test_other_parameters_in_the_groups_are_refused(
    strategy: str, change: Callable[[Any], None]
) -> None:
    """They were stepped on as if nothing had changed, or it was an error of `zip`."""

    def train() -> None:
        module = seeded()
        first, *others = module.layers
        groups = [
            {"params": list(first.parameters())},
            {"params": list(nn.ModuleList(others).parameters())},
        ]
        plain = torch.optim.SGD(groups, lr=0.1)
        model, optimizer = shoal.as_distributed(module, plain, strategy=strategy)
        one_step(model, optimizer, local(0))
        before = whole_state(model)
        change(optimizer)
        with pytest.raises(ShoalError, match="param_groups have changed since it was wrapped"):
            one_step(model, optimizer, local(1))
        assert_same(whole_state(model), before)

    run(train)


class Scaled(nn.Module):
    """With a whole number among its parameters, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@distinct
@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
def test_a_parameter_of_whole_numbers_is_passed_over(strategy: str, kind: str) -> None:
    def train(strategy: str | None) -> State:
        torch.manual_seed(0)
        model: Any = Scaled()
        model.layer.double()
        optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        if strategy is not None:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        for step in range(3):
            one_step(model, optimizer, data(step) if strategy is None else local(step))
        return whole_state(model)

    for state in run(train, strategy):
        assert_same(state, train(None), 1e-6)

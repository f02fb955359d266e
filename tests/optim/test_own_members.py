"""What optimizers of users have besides `step`: attributes, and methods that look at state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import shoal
from shoal.errors import ShoalError
from strategies.loops import (
    State,
    assert_same,
    data,
    distinct,
    local,
    one_step,
    run,
    seeded,
    whole_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*may couple any of its parameters")


class Averaging(Optimizer):
    """Descends, and keeps an average of each parameter that may be put in its place."""

    decay = 0.0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.model = "a name that the wrapped optimizer has, too"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - self.decay).sub_(p.grad, alpha=group["lr"])
                state = self.state[p]
                state["mean"] = torch.lerp(state.get("mean", p), p, 0.1)

    @torch.no_grad()
    def swap(self) -> None:
        """As optimizers without a schedule do to evaluate; does nothing before the first step."""
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p]:
                before = p.clone()
                p.copy_(self.state[p]["mean"])
                self.state[p]["mean"].copy_(before)


def train(strategy: str | None, *, swaps: bool, kind: str | None = None) -> State:
    model: Any = seeded()
    optimizer: Any = Averaging(model.parameters())
    if strategy is not None:
        model = shoal.as_distributed(model, strategy=strategy)
        pair = shoal.optim.PAIRS[strategy].optimizer
        optimizer = pair(optimizer, model, kind=kind)
    for step in range(4):
        optimizer.decay = 0.01 * step
        one_step(model, optimizer, data(step) if strategy is None else local(step))
        if swaps:
            optimizer.swap()
    assert optimizer.decay == 0.03
    return whole_state(model)


@distinct
def test_attributes_are_set_where_steps_go_by_them(strategy: str) -> None:
    expected = train(None, swaps=False)
    for state in run(lambda: train(strategy, swaps=False)):
        assert_same(state, expected)


@distinct
def test_a_method_that_looks_at_the_state_is_right_or_refused(strategy: str) -> None:
    """It found nothing, since the state was that of other tensors, and did nothing."""
    expected = train(None, swaps=True)
    if strategy == "ddp":
        for state in run(lambda: train(strategy, swaps=True)):
            assert_same(state, expected)
    else:
        with pytest.raises(ShoalError, match="elements of this parameter's state"):
            run(lambda: train(strategy, swaps=True))
    for state in run(lambda: train(strategy, swaps=True, kind="global")):
        assert_same(state, expected)


class GoesBy(Optimizer):
    """Looks at more than gradients, and keeps half of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.mul_(1 - getattr(self, "decay", 0.0))
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


def go_by(strategy: str | None) -> State:
    model: Any = seeded()
    optimizer: Any = GoesBy(model.parameters())
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    for step in range(4):
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(bool(number % 2) or step < 2)
        optimizer.decay = 0.01 * step  # which it has not had before
        one_step(model, optimizer, data(step) if strategy is None else local(step))
    return whole_state(model)


@distinct
def test_what_a_step_may_look_at_is_what_it_would_be_in_one_process(strategy: str) -> None:
    expected = go_by(None)
    for state in run(go_by, strategy):
        assert_same(state, expected)


class Slow(Optimizer):
    """Steps by another optimizer, and saves that one's state along with its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, base.param_groups = base, self.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return {"own": super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["own"])
        self.base.load_state_dict(state["base"])


def slow(strategy: str) -> tuple[Any, Any]:
    model = seeded()
    plain = Slow(torch.optim.AdamW(model.parameters(), lr=0.1))
    return shoal.as_distributed(model, plain, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_what_only_the_optimizer_itself_knows_to_save_is_not_lost(
    strategy: str, tmp_path: Path
) -> None:
    def resume() -> State:
        model, optimizer = slow(strategy)
        for step in range(2):
            one_step(model, optimizer, local(step))
        with pytest.raises(ShoalError, match="Slow has a state_dict"):
            shoal.save(tmp_path, model, optimizer)
        shoal.save(tmp_path, model, extra={"optimizer": optimizer.state_dict()})
        model, optimizer = slow(strategy)
        extra = shoal.load(tmp_path, model)
        optimizer.load_state_dict(extra["optimizer"])
        for step in range(2, 4):
            one_step(model, optimizer, local(step))
        return whole_state(model)

    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        one_step(model, optimizer, data(step))
    for state in run(resume):
        assert_same(state, whole_state(model))


class LeavesGradients(Optimizer):
    """Momentum in the place of gradients, which the next backward adds to."""

    def __init__(self, params: Any, leave: str) -> None:
        super().__init__(params, {"lr": 0.1, "leave": leave})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.01)
                if group["leave"] == "another":
                    p.grad = p.grad * 0.5
                p.sub_(p.grad, alpha=group["lr"])
                if group["leave"] == "nothing":
                    p.grad = None


def accumulate(strategy: str | None, leave: str) -> State:
    model: Any = seeded()
    optimizer: Any = LeavesGradients(model.parameters(), leave)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    for step in range(4):
        x, y = data(step) if strategy is None else local(step)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return whole_state(model)


@distinct
@pytest.mark.parametrize("leave", ["the same", "another", "nothing"])
def test_what_a_step_leaves_of_gradients_is_what_backward_adds_to(
    strategy: str, leave: str
) -> None:
    expected = accumulate(None, leave)
    for state in run(accumulate, strategy, leave):
        assert_same(state, expected)


def test_a_state_that_was_put_together_is_not_written_to_in_vain() -> None:
    def write() -> None:
        module: Any = torch.nn.Linear(300, 300)  # of more elements than are stepped at once
        model = shoal.as_distributed(module, strategy="ddp")
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer: Any = shoal.optim.DDPOptimizer(plain, model)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        momentum = optimizer.state[module.weight]["momentum_buffer"]
        assert momentum.norm() > 0
        with pytest.raises(RuntimeError, match="inference tensor"):
            momentum.mul_(0.5)

    run(write)

"""Training loops in which users do this and that between forward, backward and step.

Each is drawn at random and must end as in one process: what matters is what comes before what.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.loops import State, assert_same, data, each, local, momentum, run, seeded, wrapped

pytestmark = pytest.mark.timeout(120)


class Student(nn.Module):
    """With a frozen teacher, a parameter of its own, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(7, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3)
        self.student = nn.Sequential(*layers)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) * self.scale - 0.3 * self.teacher(x)


Batches = Callable[[int], Any]
Deed = Callable[[Any, Batches, int], object]


def some(model: Any, number: int) -> nn.Parameter:
    parameters = list(model.parameters())
    return parameters[number % len(parameters)]


def predict(model: Any, batches: Batches, number: int) -> None:
    with torch.no_grad():
        model(batches(number)[0])


@torch.no_grad()
def scale(model: Any, batches: Batches, number: int) -> None:
    some(model, number).mul_(0.9)


def follow(model: Any, batches: Batches, number: int) -> None:
    for ours, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def follow_at_once(model: Any, batches: Batches, number: int) -> None:
    ours = [parameter.data for parameter in model.teacher.parameters()]
    theirs = [parameter.data for parameter in model.student.parameters()]
    torch._foreach_lerp_(ours, theirs, 0.1)


def write_late(model: Any, batches: Batches, number: int) -> None:
    memory = some(model, number).detach()
    some(model, number // 7).sum()
    memory.mul_(0.9)


def load(model: Any, batches: Batches, number: int) -> None:
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def draw_anew(model: Any, batches: Batches, number: int) -> None:
    torch.manual_seed(number)
    nn.init.normal_(some(model, number), std=0.3)


def train_more(model: Any, batches: Batches, number: int) -> None:
    x, y = batches(number)
    F.mse_loss(model(x) + model(0.5 * x), y).backward()


def clip(model: Any, batches: Batches, number: int) -> None:
    if isinstance(model, Student):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        model.clip_grad_norm_(0.5)


def clip_by_torch(model: Any, batches: Batches, number: int) -> None:
    if not isinstance(model, Student):
        model.synchronize_gradients()  # some may have been put in by hand
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def put_in(model: Any, batches: Batches, number: int) -> None:
    """A gradient of one's own."""
    x, y = batches(number)
    chosen = model.scale, model.student[number % 2 * 3].weight
    gradients = torch.autograd.grad(F.mse_loss(model(x), y), chosen)
    chosen[number % 2].grad = gradients[number % 2]


def change_gradient(model: Any, batches: Batches, number: int) -> None:
    parameter = some(model, number)
    if parameter.grad is not None:
        parameter.grad.mul_(0.9)
        parameter.grad.view(-1)[number % parameter.numel()] = 0.25


def replace_gradient(model: Any, batches: Batches, number: int) -> None:
    parameter = some(model, number)
    if parameter.grad is not None:
        parameter.grad = 0.5 * parameter.grad + 0.01


LOOKS: dict[str, Deed] = {
    "look": lambda model, batches, number: some(model, number).data.sum(),
    "norm": lambda model, batches, number: [p.detach().norm() for p in model.parameters()],
    "state": lambda model, batches, number: model.state_dict(),
    "forward": lambda model, batches, number: model(batches(number)[0]),
    "predict": predict,
}
CHANGES: dict[str, Deed] = {
    "scale": scale,
    "follow": follow,
    "follow at once": follow_at_once,
    "write late": write_late,
    "load": load,
    "draw anew": draw_anew,
}
GRADIENTS: dict[str, Deed] = {
    "train more": train_more,
    "clip": clip,
    "clip by torch": clip_by_torch,
    "put in": put_in,
    "change gradient": change_gradient,
    "replace gradient": replace_gradient,
}
DEEDS = {**LOOKS, **CHANGES, **GRADIENTS}


def deeds(names: Any) -> Any:
    return st.lists(st.tuples(st.sampled_from(sorted(names)), st.integers(0, 999)), max_size=2)


# What is between forward and backward must not change what backward needs.
STEPS = st.lists(st.tuples(deeds(LOOKS), deeds(DEEDS), deeds(DEEDS)), min_size=3, max_size=5)


def train(model: Any, optimizer: Any, batches: Batches, steps: Any) -> State:
    def do(what: Any) -> None:
        for name, number in what:
            DEEDS[name](model, batches, number)

    for step, (after_forward, after_backward, after_step) in enumerate(steps):
        x, y = batches(step)
        loss = F.mse_loss(model(x), y)
        do(after_forward)
        loss.backward()
        do(after_backward)
        optimizer.step()
        optimizer.zero_grad()
        do(after_step)
    return {name: value.clone() for name, value in model.state_dict().items()}


def on_rank(strategy: str, steps: Any) -> State:
    model, optimizer = wrapped(strategy, Student, min_group_bytes=1)
    return train(model, optimizer, local, steps)


@each
@given(steps=STEPS)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_whatever_users_do_in_between(strategy: str, steps: Any) -> None:
    model = seeded(Student)
    expected = train(model, momentum(model), data, steps)
    for state in run(on_rank, strategy, steps, ranks=2):
        assert_same(state, expected)

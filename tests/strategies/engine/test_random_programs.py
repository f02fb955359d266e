"""Training loops in which users do this and that between forward, backward and step.

Each is drawn at random and must end as in one process: what matters is what comes before what.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.loops import State, assert_same, data, each, local, momentum, run, seeded, wrapped


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


@dataclass
class Loop:
    """What the deeds of a user have at hand."""

    model: Any
    optimizer: Any
    batches: Batches
    has_own_gradients: bool = False
    """Whether some were put in by hand and are not averaged yet."""

    def average(self) -> None:
        """Before gradients are looked at, or clipped by torch, which cannot know whose they are."""
        if self.has_own_gradients and not isinstance(self.model, Student):
            self.model.synchronize_gradients()
        self.has_own_gradients = False

    def some(self, number: int) -> nn.Parameter:
        """One of the parameters."""
        parameters = list(self.model.parameters())
        return parameters[number % len(parameters)]

    def loss(self, number: int) -> Tensor:
        """Of another batch."""
        x, y = self.batches(number)
        return F.mse_loss(self.model(x), y)


Deed = Callable[[Loop, int], object]


# Looking ---------------------------------------------------------------------------------------


def predict(loop: Loop, number: int) -> None:
    with torch.no_grad():
        loop.model(loop.batches(number)[0])


def look_at_gradient(loop: Loop, number: int) -> None:
    loop.average()
    gradient = loop.some(number).grad
    if gradient is not None:
        assert bool(gradient.isfinite().all())
        assert float(gradient.norm()) >= 0


LOOKS: dict[str, Deed] = {
    "look": lambda loop, number: loop.some(number).data.sum(),
    "norm": lambda loop, number: [p.detach().norm() for p in loop.model.parameters()],
    "state": lambda loop, number: loop.model.state_dict(),
    "forward": lambda loop, number: loop.model(loop.batches(number)[0]),
    "predict": predict,
}


# Changing weights ------------------------------------------------------------------------------


@torch.no_grad()
def scale(loop: Loop, number: int) -> None:
    loop.some(number).mul_(0.9)


def clamp(loop: Loop, number: int) -> None:
    for parameter in loop.model.parameters():
        parameter.data.clamp_(-0.5, 0.5)


@torch.no_grad()
def reset_row(loop: Loop, number: int) -> None:
    loop.some(number)[0] = 0.1


def replace_data(loop: Loop, number: int) -> None:
    parameter = loop.some(number)
    parameter.data = parameter.data * 0.9


def from_vector(loop: Loop, number: int) -> None:
    vector = nn.utils.parameters_to_vector(loop.model.parameters())
    nn.utils.vector_to_parameters(0.9 * vector.detach(), loop.model.parameters())


def follow(loop: Loop, number: int) -> None:
    teacher, student = loop.model.teacher, loop.model.student
    for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def follow_at_once(loop: Loop, number: int) -> None:
    ours = [parameter.data for parameter in loop.model.teacher.parameters()]
    theirs = [parameter.data for parameter in loop.model.student.parameters()]
    torch._foreach_lerp_(ours, theirs, 0.1)


def write_late(loop: Loop, number: int) -> None:
    memory = loop.some(number).detach()
    loop.some(number // 7).sum()
    memory.mul_(0.9)


def swap(loop: Loop, number: int) -> None:
    """Evaluates with other weights, and goes back."""
    before = [parameter.data for parameter in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data = 0.9 * parameter.data
    predict(loop, number)
    for parameter, memory in zip(loop.model.parameters(), before, strict=True):
        parameter.data = memory


def load(loop: Loop, number: int) -> None:
    state = loop.model.state_dict()
    loop.model.load_state_dict({name: 0.9 * value for name, value in state.items()})


def draw_anew(loop: Loop, number: int) -> None:
    torch.manual_seed(number)
    nn.init.normal_(loop.some(number), std=0.3)


CHANGES: dict[str, Deed] = {
    "scale": scale,
    "clamp": clamp,
    "reset row": reset_row,
    "replace data": replace_data,
    "from vector": from_vector,
    "follow": follow,
    "follow at once": follow_at_once,
    "write late": write_late,
    "swap": swap,
    "load": load,
    "draw anew": draw_anew,
}


# Changing gradients ----------------------------------------------------------------------------


def train_more(loop: Loop, number: int) -> None:
    x, y = loop.batches(number)
    F.mse_loss(loop.model(x) + loop.model(0.5 * x), y).backward()


def clip(loop: Loop, number: int) -> None:
    if isinstance(loop.model, Student):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
    else:
        loop.model.clip_grad_norm_(0.5)


def scale_gradient(loop: Loop, number: int) -> None:
    gradient = loop.some(number).grad
    if gradient is not None:
        gradient.mul_(0.5)


def write_to_gradient(loop: Loop, number: int) -> None:
    parameter = loop.some(number)
    if parameter.grad is not None:
        parameter.grad.view(-1)[number % parameter.numel()] = 0.25


def replace_gradient(loop: Loop, number: int) -> None:
    parameter = loop.some(number)
    if parameter.grad is not None:
        parameter.grad = parameter.grad * 0.5


def drop_gradient(loop: Loop, number: int) -> None:
    loop.some(number).grad = None


def set_gradients(loop: Loop, number: int) -> None:
    """By hand, as methods for several tasks do: what a rank computes is of its own batch."""
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    if not trained:
        return
    some = trained[number % len(trained) :][:2]
    gradients = torch.autograd.grad(loop.loss(number), some, allow_unused=True)
    for parameter, gradient in zip(some, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient
    loop.has_own_gradients = True


def clip_by_torch(loop: Loop, number: int) -> None:
    loop.average()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)


def clip_values(loop: Loop, number: int) -> None:
    loop.average()
    if any(parameter.grad is not None for parameter in loop.model.parameters()):
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.05)


GRADIENTS: dict[str, Deed] = {
    "train more": train_more,
    "clip": clip,
    "clip by torch": clip_by_torch,
    "clip values": clip_values,
    "look at gradient": look_at_gradient,
    "scale gradient": scale_gradient,
    "write to gradient": write_to_gradient,
    "replace gradient": replace_gradient,
    "drop gradient": drop_gradient,
    "set gradients": set_gradients,
}


# Changing what is trained, and how -------------------------------------------------------------


def freeze(loop: Loop, number: int) -> None:
    """Or trains it again."""
    parameter = loop.some(number)
    parameter.requires_grad_(not parameter.requires_grad)


def change_options(loop: Loop, number: int) -> None:
    group = loop.optimizer.param_groups[0]
    group["lr"] = 0.02 * (1 + number % 5)
    group["weight_decay"] = 0.01 * (number % 3)


OPTIONS: dict[str, Deed] = {"freeze": freeze, "change options": change_options}
DEEDS = {**LOOKS, **CHANGES, **GRADIENTS, **OPTIONS}


def deeds(names: Any) -> Any:
    return st.lists(st.tuples(st.sampled_from(sorted(names)), st.integers(0, 999)), max_size=2)


# What is between forward and backward must not change what backward needs. Frozen parameters are
# told from trained ones when a forward begins.
AFTER_BACKWARD = {**LOOKS, **CHANGES, **GRADIENTS, "change options": change_options}
STEPS = st.lists(
    st.tuples(deeds(LOOKS), deeds(AFTER_BACKWARD), deeds(DEEDS)), min_size=3, max_size=5
)


def train(model: Any, optimizer: Any, batches: Batches, steps: Any) -> State:
    loop = Loop(model, optimizer, batches)

    def do(what: Any) -> None:
        for name, number in what:
            DEEDS[name](loop, number)

    for step, (after_forward, after_backward, after_step) in enumerate(steps):
        x, y = batches(step)
        loss = F.mse_loss(model(x), y)
        do(after_forward)
        if loss.requires_grad:
            loss.backward()
        do(after_backward)
        optimizer.step()
        optimizer.zero_grad()
        loop.has_own_gradients = False
        do(after_step)
    return {name: value.clone() for name, value in model.state_dict().items()}


def on_rank(strategy: str, steps: Any) -> State:
    model, optimizer = wrapped(strategy, Student, min_group_bytes=1)
    return train(model, optimizer, local, steps)


# What once went wrong.
LATE_WRITE: Any = [([], [], []), ([], [("write late", 15)], []), ([], [], [])]
REPLACED: Any = [
    ([], [], []),
    ([], [("replace data", 63)], [("from vector", 0)]),
    ([], [("replace data", 63)], [("from vector", 0), ("follow at once", 0)]),
]
SWAPPED: Any = [([], [], [("swap", 0)]), ([], [], [("swap", 1), ("follow", 0)]), ([], [], [])]


@each
@given(steps=STEPS)
@example(steps=LATE_WRITE)
@example(steps=REPLACED)
@example(steps=SWAPPED)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_whatever_users_do_in_between(strategy: str, steps: Any) -> None:
    model = seeded(Student)
    expected = train(model, momentum(model), data, steps)
    for state in run(on_rank, strategy, steps, ranks=2):
        assert_same(state, expected)

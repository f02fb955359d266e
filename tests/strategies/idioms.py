"""What people do to weights by hand, as they do it to a plain model.

Each idiom trains for some steps and returns numbers that must not depend on who trains. It gets the
model and the optimizer, wrapped or not, and a function that gives the batch of a step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from strategies.loops import one_step, seeded, whole_state

Batch = Callable[[int], Any]
Wrap = Callable[[nn.Module], tuple[Any, Any]]
STEPS = 3


def after_each_step(edit: Callable[[Any], None]) -> Any:
    def idiom(wrap: Wrap, batch: Batch) -> Any:
        model, optimizer = wrap(seeded())
        for step in range(STEPS):
            one_step(model, optimizer, batch(step))
            edit(model)
        return whole_state(model)

    idiom.__name__ = edit.__name__
    return idiom


@after_each_step
def clip_weights(model: Any) -> None:
    """As a WGAN's critic."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@after_each_step
@torch.no_grad()
def normalise(model: Any) -> None:
    for parameter in model.parameters():
        parameter.div_(parameter.norm() + 1)


@after_each_step
@torch.no_grad()
def reset_rows(model: Any) -> None:
    weight = max(model.parameters(), key=Tensor.numel)
    weight[3].zero_()
    weight.data[1, 2] = 0.5  # one element, which no version counter sees


@after_each_step
def reset_layer(model: Any) -> None:
    torch.manual_seed(1)
    nn.init.xavier_uniform_(max(model.parameters(), key=Tensor.numel))


@after_each_step
def as_vector(model: Any) -> None:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(0.9 * vector, model.parameters())


@after_each_step
@torch.no_grad()
def prune(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_((torch.arange(parameter.numel()) % 3 > 0).view(parameter.shape))


@after_each_step
def other_memory(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@after_each_step
@torch.no_grad()
def clip_spectrum(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            left, values, right = torch.linalg.svd(parameter, full_matrices=False)
            parameter.copy_(left @ torch.diag(values.clamp(max=0.5)) @ right)


@after_each_step
def all_at_once(model: Any) -> None:
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.9)
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 0.01)


@after_each_step
def mean_of_all(model: Any) -> None:
    """One operation on parameters of several groups."""
    first, *_, last = model.parameters()
    total = torch.stack(torch._foreach_norm(list(model.parameters()))).sum()
    product = torch.outer(first.view(-1), last).sum()
    first.data.add_((total + product).item(), alpha=0.01)


@after_each_step
def in_full_parameters(model: Any) -> None:
    whole = getattr(model, "full_parameters", contextlib.nullcontext)
    with whole(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


@after_each_step
def loaded(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    clip_parameters(model, 0.2)


@torch.no_grad()
def clip_parameters(model: Any, limit: float) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-limit, limit)


def between_backward_and_step(wrap: Wrap, batch: Batch) -> Any:
    model, optimizer = wrap(seeded())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        clip_parameters(model, 0.2)
        optimizer.step()
        clip_parameters(model, 0.3)
    return whole_state(model)


def follow(wrap: Wrap, batch: Batch) -> Any:
    """A plain teacher, as of BYOL and MoCo."""
    module = seeded()
    teacher = copy.deepcopy(module)
    model, optimizer = wrap(module)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y + teacher(x).detach()).backward()
        optimizer.step()
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return whole_state(model) | {f"teacher.{n}": v for n, v in whole_state(teacher).items()}


def follow_wrapped(wrap: Wrap, batch: Batch) -> Any:
    module = seeded()
    teacher, _ = wrap(copy.deepcopy(module))
    model, optimizer = wrap(module)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.no_grad():
            target = y + teacher(x)
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
    return whole_state(model) | {f"teacher.{n}": v for n, v in whole_state(teacher).items()}


def evaluate_average(wrap: Wrap, batch: Batch) -> Any:
    """An average is swapped in to evaluate, and out again."""
    model, optimizer = wrap(seeded())
    average = [parameter.detach().clone() for parameter in model.parameters()]
    outputs = {}
    for step in range(STEPS):
        one_step(model, optimizer, batch(step))
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
            swap(model, average)
            outputs[f"output {step}"] = model(torch.ones(2, 7, dtype=torch.double))
            swap(model, average)
    return whole_state(model) | outputs


def swap(model: Any, others: list[Tensor]) -> None:
    for other, parameter in zip(others, model.parameters(), strict=True):
        mine = parameter.clone()
        parameter.copy_(other)
        other.copy_(mine)


def evaluate_in_other_memory(wrap: Wrap, batch: Batch) -> Any:
    """Gives parameters the memory of an average for a while, and then their own again."""
    model, optimizer = wrap(seeded())
    average = [parameter.detach().clone() for parameter in model.parameters()]
    outputs = {}
    for step in range(STEPS):
        one_step(model, optimizer, batch(step))
        own = [parameter.data for parameter in model.parameters()]
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.data, 0.3)
        for mean, parameter in zip(average, model.parameters(), strict=True):
            parameter.data = mean
        with torch.no_grad():
            outputs[f"output {step}"] = model(torch.ones(2, 7, dtype=torch.double))
        for memory, parameter in zip(own, model.parameters(), strict=True):
            parameter.data = memory
        del own
    return whole_state(model) | outputs


def climb_and_return(wrap: Wrap, batch: Batch) -> Any:
    """As SAM: the gradient is that of a neighbouring point."""
    model, optimizer = wrap(seeded())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.no_grad():
            ways = [0.05 * parameter.sign() for parameter in model.parameters()]
            for parameter, way in zip(model.parameters(), ways, strict=True):
                parameter.add_(way)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter, way in zip(model.parameters(), ways, strict=True):
                parameter.sub_(way)
        optimizer.step()
    return whole_state(model)


class Tied(nn.Module):
    """One weight that two layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def tied(wrap: Wrap, batch: Batch) -> Any:
    model, optimizer = wrap(seeded(Tied))
    for step in range(STEPS):
        one_step(model, optimizer, batch(step))
        model.second.weight.data.clamp_(-0.2, 0.2)
    return whole_state(model)


def inside_forward(wrap: Wrap, batch: Batch) -> Any:
    model, optimizer = wrap(seeded(Constrained))
    for step in range(STEPS):
        one_step(model, optimizer, batch(step))
    return whole_state(model)


class Constrained(nn.Module):
    """Keeps its weights small, inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = torch.renorm(self.first.weight.data, 2, 0, 0.5)
        self.last.weight.data.mul_(0.9)
        return self.last(torch.tanh(self.first(x)))


IDIOMS: list[Callable[[Wrap, Batch], Any]] = [
    clip_weights, normalise, reset_rows, reset_layer, as_vector, prune, other_memory, clip_spectrum,
    all_at_once, mean_of_all, in_full_parameters, loaded, between_backward_and_step, follow,
    follow_wrapped, evaluate_average, evaluate_in_other_memory, climb_and_return, tied,
    inside_forward,
]  # fmt: skip

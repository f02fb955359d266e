"""What people do with gradients between backward and step, in plain PyTorch.

Each is called by one process and by ranks alike: ``idiom(model, optimizer, loss)``, where
``loss(step)`` is the loss of the whole batch in the one, of a rank's rows in the other. They lie
in a module of their own so that ranks import them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[int], Tensor]


def clipping_by_norm(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    norms = []
    for step, norm_type in enumerate((2.0, 1.0, float("inf"), 3.0)):
        optimizer.zero_grad()
        loss(step).backward()
        is_foreach = None if step % 2 else False
        norms.append(
            nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=is_foreach)
        )
        optimizer.step()
    return norms


def clipping_in_two_halves(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    loss(0).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    optimizer.step()
    return [norm]


def clipping_by_value(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    for step in range(2):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=None if step else False)
        optimizer.step()
    return []


def clipping_of_the_optimizers_groups(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """As timm does."""
    loss(0).backward()
    own = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(own, 0.05)
    optimizer.step()
    return [norm]


def adaptive_clipping(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """Gradients are limited unit by unit, relative to the weights."""
    loss(0).backward()
    for parameter in model.parameters():
        gradient, value = parameter.grad.detach(), parameter.detach()
        dims = tuple(range(1, gradient.dim()))
        size = value.norm(dim=dims, keepdim=True) if dims else value.norm()
        limit = size.clamp(min=1e-3) * 0.02
        norm = gradient.norm(dim=dims, keepdim=True) if dims else gradient.norm()
        clipped = gradient * (limit / norm.clamp(min=1e-6))
        parameter.grad.detach().copy_(torch.where(norm < limit, gradient, clipped))
    optimizer.step()
    return []


def edits_in_place(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    loss(0).backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        gradient.add_(parameter.detach(), alpha=0.1)
        gradient.mul_(0.5).nan_to_num_().clamp_(-0.2, 0.2)
        gradient[0] = 0.25
        gradient.view(-1)[1:3].mul_(2)
        gradient.data.sub_(0.01)
        gradient.detach().flatten()[-1:].fill_(0.5)
        gradient.index_fill_(0, torch.tensor([1]), 0.125)
        gradient.masked_fill_(gradient > 0.3, 0.3)
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.9)
    torch._foreach_add_(
        [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]
    )
    optimizer.step()
    optimizer.zero_grad()
    loss(1).backward()
    optimizer.step()
    return []


def views_that_are_held(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """They are the gradient, whatever is done to it or to them in between."""
    loss(0).backward()
    views = [p.grad.view(-1) for p in model.parameters()]
    for parameter, view in zip(model.parameters(), views, strict=True):
        parameter.grad.mul_(3.0)
        view.add_(0.01)
        view.data.mul_(0.5)
    sums = [view.sum() for view in views]
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    sums += [view.sum() for view in views]
    loss(1).backward()
    views[0].mul_(2.0)
    optimizer.step()
    return sums


def replaced_gradients(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    loss(0).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5 + 0.1 * parameter.detach()
    loss(1).backward()
    for parameter in model.parameters():
        parameter.grad = torch.sign(parameter.grad.clone()) * parameter.grad.abs().sqrt()
    optimizer.step()
    return []


def old_gradients(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """What was kept of them stays what it was."""
    loss(0).backward()
    kept = [p.grad for p in model.parameters()]
    others = [p.grad.detach() for p in model.parameters()]
    model.zero_grad()
    loss(1).backward()
    for parameter, first, same in zip(model.parameters(), kept, others, strict=True):
        parameter.grad.add_(first).sub_(same, alpha=0.5)
    optimizer.step()
    return []


def sharpness_aware(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """SAM: the gradient of where the loss rises most."""
    for step in range(2):
        optimizer.zero_grad()
        loss(step).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moved = [p.grad * (0.05 / norm) for p in model.parameters()]
            _move(model, moved, 1.0)
        optimizer.zero_grad()
        loss(step).backward()
        with torch.no_grad():
            _move(model, moved, -1.0)
        optimizer.step()
    return [norm]


def _move(model: Any, directions: list[Tensor], sign: float) -> None:
    full = getattr(model, "full_parameters", None)
    if full is None:
        for parameter, direction in zip(model.parameters(), directions, strict=True):
            parameter.add_(direction, alpha=sign)
    else:
        with full():
            _move(model.module, directions, sign)


def gradient_surgery(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """PCGrad: of two tasks, each gives up what is against the other."""
    tasks = []
    for step in range(2):
        optimizer.zero_grad()
        loss(step).backward()
        tasks.append([p.grad.clone() for p in model.parameters()])
    flat = [torch.cat([g.flatten() for g in task]) for task in tasks]
    first = flat[0] - min(float(flat[0] @ flat[1]), 0.0) / flat[1].norm() ** 2 * flat[1]
    joined = first + flat[1]
    for parameter in model.parameters():
        parameter.grad = joined[: parameter.numel()].view(parameter.shape)
        joined = joined[parameter.numel() :]
    optimizer.step()
    return []


def several_backwards(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    norms = []
    for step in range(3):
        loss(step).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    return norms


def numbers(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """All that is one number of a gradient, or needs all of it."""
    loss(0).backward()
    found: list[Any] = []
    for parameter in model.parameters():
        g = parameter.grad
        found += [g.norm(), g.norm(1), g.norm(float("inf")), g.norm(0), torch.linalg.vector_norm(g)]
        found += [g.sum(), g.mean(), g.max(), g.min(), g.abs().max(), g.amax(), g.amin()]
        found += [g.isfinite().all(), (g > 0.01).any(), (g > 0).sum(), torch.count_nonzero(g)]
        found += [(g * g).sum(), (2 * g - g / 3).norm(), torch.equal(g, g.clone()), g.std()]
        found += [g.pow(2).mean().sqrt(), g.sum(0), g.argmax(), torch.allclose(g, g * 1.0)]
        found += [torch.zeros_like(g).sum(), float(g.norm()), g.flatten().dot(g.flatten())]
        found += [g.tolist(), g.detach().cpu().clone().numpy(), g.new_ones(2), g.float().norm()]
        found += [len(repr(g)) > 5, g.shape, g.dtype == parameter.dtype, g.is_sparse]
    return [torch.as_tensor(each).double().flatten() for each in found]


def scaled_losses(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """With torch's own scaler; the loss of the third step is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss(step) * (float("inf") if step == 2 else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
    return scales


def put_in_by_hand(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """From `torch.autograd.grad`: ranks have their own, and average them like any other."""
    parameters = list(model.parameters())
    for step in range(3):
        gradients = torch.autograd.grad(loss(step), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if step == 1:  # backward adds to them
            loss(step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def put_into_data(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    for step in range(2):
        loss(step).backward()
        for parameter in model.parameters():
            parameter.grad.data = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        loss(step).backward()
        first = next(iter(model.parameters()))
        first.grad.data = torch.zeros_like(first)
        model.zero_grad()
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def averaged_put_into_data(model: Any, optimizer: Any, loss: Loss) -> list[Tensor]:
    """What is computed from averaged gradients is averaged, also by way of ``.data``."""
    norms = []
    for step in range(3):
        loss(step).backward()
        first, second, third, *others = model.parameters()
        first.grad.data = first.grad.data  # itself
        second.grad.data = second.grad.data.sign() * 0.5 + 0.01
        scaled = third.grad * 0.5
        third.grad.data = scaled
        scaled.mul_(3)
        for parameter in others:
            parameter.grad.data = torch.ones_like(parameter)
            parameter.grad.data = parameter.grad.data * 0.1
        norms += [parameter.grad.norm() for parameter in model.parameters()]
        if step:
            loss(step + 1).backward()  # adds to them
        optimizer.step()
        optimizer.zero_grad()
    return norms


IDIOMS = [
    clipping_by_norm, clipping_in_two_halves, clipping_by_value, clipping_of_the_optimizers_groups,
    adaptive_clipping, edits_in_place, views_that_are_held, replaced_gradients, old_gradients,
    sharpness_aware, gradient_surgery, several_backwards, numbers, scaled_losses, put_in_by_hand,
    put_into_data, averaged_put_into_data,
]  # fmt: skip

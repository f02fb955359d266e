"""Optimizers, gradient scalers and data loaders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from needs import needs
from shoal.torch_internals import optimizers


def test_hooks_of_a_step_can_be_taken_away_and_put_back() -> None:
    optimizer, called = SGD([nn.Parameter(torch.ones(1))]), []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    hooks = optimizers.hooks_before_step(optimizer), optimizers.hooks_after_step(optimizer)
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    optimizer.step()
    assert called == [], needs("a step calls the hooks in its dicts only")
    for each, before in zip(hooks, kept, strict=True):
        each.update(before)
    optimizer.step()
    assert called == ["before", "after"], needs("a step calls the hooks in its dicts")


def test_a_step_that_a_scheduler_counts_is_the_classs() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not optimizers.has_own_step(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer), needs("schedulers replace a step by one that counts")
    assert not optimizers.has_own_step(optimizer), needs("schedulers mark the step they replace")
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]
    assert optimizers.has_own_step(optimizer)


def test_unscaling_can_be_replaced() -> None:
    seen = []

    class Scaler(optimizers.UnscalingScaler):
        def unscale_gradients(
            self, optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
        ) -> dict[torch.device, Tensor]:
            seen.append(float(self.scale_tensor))
            return super().unscale_gradients(optimizer, inverse, found, allow_fp16)

    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = SGD([parameter]), Scaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad == 8
    scaler.unscale_(optimizer)
    assert parameter.grad == 1, needs("a gradient scaler divides by its scale")
    assert seen == [8], needs("a gradient scaler unscales through a method that can be replaced")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_parameter_tells_that_its_optimizer_steps_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(SGD, [parameter], {"lr": 0.1})
    is_told = optimizers.IN_BACKWARD_OPTIMIZERS in vars(parameter)
    assert is_told, needs("parameters keep the optimizers that step in backward")


def test_a_loader_counts_what_it_has_handed_out() -> None:
    loader: DataLoader[int] = DataLoader(range(4), batch_size=1)  # type: ignore[arg-type]
    reader = iter(loader)
    next(reader)
    assert optimizers.num_yielded(reader) == 1, needs("a loader's iterator counts batches")
    assert not optimizers.reads_ahead(reader), needs("an iterator says that it has no workers")
    assert optimizers.LOADER_READER in vars(loader), needs("a loader keeps its iterator")

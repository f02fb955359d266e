"""A small model and its batch, and one step of a pipeline compared with one process."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from strategies.models import random_numbers


def layers(count=4):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))).double()


def batch(step=0, items=6):
    numbers = random_numbers(step, items, 8)
    return numbers[:, :4], numbers[:, 4:]


def assert_same_step(model, loss, plain, expected) -> None:
    """A pipeline's loss and gradients are those of one process; ``expected`` is its loss."""
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(model, plain)


def assert_same_gradients(model, plain) -> None:
    """All stages together have the gradients of one process."""
    found = dict(model.full_gradients())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def check_gradients(build, ranks, **options) -> None:
    """All ranks have the loss and the gradients of one process."""

    def train():
        torch.manual_seed(0)
        module = build()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=3, **options)
        x, y = batch()
        loss = model.train_step(x, y, F.mse_loss)
        assert_same_step(model, loss, plain, F.mse_loss(plain(x), y))

    shoal.run(train, ranks, "memory")

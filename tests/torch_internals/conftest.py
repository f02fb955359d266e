"""What torch loads at its first use, and keeps, is loaded before the first test."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session", autouse=True)
def torch_is_loaded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself, another one in each version
        torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))
        torch.func.jvp(torch.sum, (torch.ones(1),), (torch.ones(1),))
        importlib.import_module("torch.distributed.optim")
        torch._dynamo.reset()

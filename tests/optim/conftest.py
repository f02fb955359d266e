"""What the tests of optimizers need: the one-time effects of torch's first step are no leak."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def first_step() -> None:
    """The first step of an optimizer imports torch's compiler, which sets a variable."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()

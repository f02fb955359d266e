"""What training in these tests needs to be quick and to leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def first_use() -> None:
    """The first step of an optimizer sets a variable that stays."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: several threads for one would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""What training in these tests needs to be quick and to leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pools


@pytest.fixture(scope="session", autouse=True)
def pools_end() -> Iterator[None]:
    """Ends the worlds with the session."""
    yield
    pools.close_all()


@pytest.fixture(scope="session", autouse=True)
def first_use() -> None:
    """The first step of an optimizer sets a variable that stays."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()

"""What the tests of checkpoints need: quick small tensors, and worlds that end with the session."""

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
def first_use() -> Iterator[None]:
    """The first step of an optimizer sets variables, and so does transformers."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    parameter = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([parameter]).step()
    yield
    patch.undo()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: several threads for one would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

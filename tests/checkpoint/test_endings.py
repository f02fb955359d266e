"""How a save ends that cannot end well: arguments that differ, errors at the very end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.training import on_ranks
from shoal.checkpoint.disk.filesystem import FileSystem
from shoal.errors import CheckpointError, MismatchError


def save_with(path: Path, name: str, values: list[Any]) -> str:
    world = shoal.world()
    model = shoal.as_distributed(nn.Linear(2, 2), strategy="ddp")
    value = values[world.rank]
    options = {} if name == "path" else {name: value}
    with pytest.raises(MismatchError) as caught:
        shoal.save(path / str(value) if name == "path" else path, model, **options)
    shoal.save(path, model, step=7)  # the ranks still work together
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("step", [0, 1], "step is 0 on rank 0 and 1 on rank 1"),
        ("keep", [None, 3], "keep is None on rank 0 and 3 on rank 1"),
        ("wait", [True, False], "wait is True on rank 0 and False on rank 1"),
        ("path", ["a", "b"], "the folder is 'a' on rank 0 and 'b' on rank 1"),
    ],
)
def test_arguments_that_differ(tmp_path: Path, name: str, values: list[Any], text: str) -> None:
    assert all(text in message for message in on_ranks(save_with, 2, tmp_path, name, values))
    assert [each.name for each in tmp_path.glob("*-step-*")] == ["000001-step-7"]


class FailingSync(FileSystem):
    """Fails with one of the syncs of the folder of checkpoints."""

    def __init__(self, root: Path, failing: int) -> None:
        super().__init__()
        self._root, self._left = root, failing

    def sync_folder(self, path: Path) -> None:
        if path == self._root:
            self._left -= 1
            if self._left == 0:
                raise OSError(5, "Input/output error")
        super().sync_folder(path)


@pytest.mark.parametrize(
    ("failing", "text", "loaded"),
    [(1, "LATEST names another, so load() takes that", 1.0), (2, "is what load() takes", 2.0)],
)
def test_an_error_at_the_very_end(tmp_path: Path, failing: int, text: str, loaded: float) -> None:
    root, model = tmp_path / "run", nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    shoal.save(root, model, step=1)
    nn.init.constant_(model.weight, 2.0)
    with pytest.raises(CheckpointError, match="in place all the same") as caught:
        shoal.save(root, model, step=2, filesystem=FailingSync(root, failing))
    assert text in str(caught.value)
    shoal.load(root, model)
    assert torch.equal(model.weight, torch.full((1, 1), loaded))
    shoal.load(root / "000002-step-2", model)
    assert torch.equal(model.weight, torch.full((1, 1), 2.0))

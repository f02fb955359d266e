"""The ranks of a tensor group must be given the same batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import MismatchError


def test_other_batches_in_one_tensor_group_are_refused() -> None:
    """Each rank's part of a layer was multiplied with something else, and nobody said a word."""

    def forward(is_plain: bool) -> None:
        model = shoal.as_distributed(nn.Linear(4, 4), strategy="tensor")
        inputs = torch.ones(2, 4)
        inputs[0, shoal.world().rank] = 3.0
        model(inputs) if is_plain else model.train_step(inputs, inputs, F.mse_loss)

    for is_plain in (True, False):
        with pytest.raises(MismatchError, match="must be given the same batch; ranks 0 and 1"):
            shoal.run(forward, 2, "memory", args=(is_plain,))

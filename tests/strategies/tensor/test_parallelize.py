"""Modules are changed in place and stay the modules they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import MismatchError
from shoal.strategies.tensor import parallelize
from strategies.models import random_numbers
from strategies.tensor.layers.comparison import run


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_paths_of_evaluation_are_left() -> None:
    def check() -> None:
        def make() -> nn.Module:
            layer = nn.TransformerEncoderLayer(12, 6, 7, batch_first=True)
            return nn.TransformerEncoder(layer, 2)

        torch.manual_seed(0)
        whole, split = make().eval(), make().eval()
        split.load_state_dict(whole.state_dict())
        parallelize(split, shoal.world().backend)
        x = random_numbers(1, 2, 5, 12, dtype=torch.float32)
        padding = torch.arange(5)[None] >= torch.tensor([[5], [3]])
        with torch.no_grad():
            for options in ({}, {"src_key_padding_mask": padding}):
                one, other = whole(x, **options), split(x, **options)
                kept = ~padding if options else torch.ones_like(padding)
                torch.testing.assert_close(other[kept], one[kept], rtol=0, atol=1e-5)

    run(check)


def test_layers_keep_their_identity() -> None:
    def check() -> None:
        module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        before = [id(parameter) for parameter in module.parameters()]
        names = list(module.state_dict())
        parallelize(module, shoal.world().backend)
        assert [id(parameter) for parameter in module.parameters()] == before
        assert list(module.state_dict()) == names
        assert all(isinstance(module[index], nn.Linear) for index in (0, 2))
        assert module[0].out_features == module[2].in_features == 2
        assert "ColumnParallelLinear(in_features=4, out_features=2" in repr(module)

    run(check)


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

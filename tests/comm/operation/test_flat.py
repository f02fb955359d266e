"""Tensors of any shape as flat memory."""

from __future__ import annotations

import torch

from shoal.comm.operation import flatten


def test_what_transports_see_is_flat_and_dense() -> None:
    """A single element of a row keeps that row's stride, and cannot be viewed as bytes then."""
    for tensor in (torch.zeros(3, 2)[:1, 1], torch.zeros(4, 2)[0, 1], torch.zeros(3, 4).t()):
        flat = flatten(tensor)
        assert flat.stride() == (1,)
        assert flat.view(torch.uint8).numel() == 4 * tensor.numel()
    row = torch.zeros(3)
    assert flatten(row).data_ptr() == row.data_ptr()
    assert flatten(torch.tensor([True])).dtype is torch.uint8

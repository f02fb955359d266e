"""Codecs on a GPU: the same shapes, bytes and rules, and the values that a CPU gives."""

from __future__ import annotations

import pytest
import torch

from compression.test_codecs import CODECS
from shoal.compression import Codec, LowRank, Payload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (1000,), (40, 70)])
def test_as_on_a_cpu(codec: Codec, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    payload = codec.encode(tensor.cuda(), draw=3)
    assert payload.data.is_cuda
    assert payload.num_bytes == codec.payload_bytes(shape, torch.float32)
    decoded = codec.decode(payload)
    moved = codec.decode(Payload(payload.data.cpu(), payload.shape, payload.dtype))
    assert torch.allclose(decoded.cpu(), moved, rtol=1e-6, atol=1e-7)
    if not getattr(codec, "stochastic", False) and not isinstance(codec, LowRank):
        expected = codec.decode(codec.encode(tensor, draw=3))
        assert torch.allclose(decoded.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nan_and_zeros(codec: Codec) -> None:
    tensor = torch.zeros(40, 70, device="cuda")
    assert not codec.decode(codec.encode(tensor)).any()
    tensor[3, 4] = torch.inf
    assert not codec.decode(codec.encode(tensor)).isfinite().all()

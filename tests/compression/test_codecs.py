"""Round trips: shapes, bytes, bounds of the error, zeros, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression import (
    Cast,
    Choose,
    Codec,
    Identity,
    LowRank,
    Payload,
    Quantize,
    RandomK,
    Sign,
    TopK,
    parse,
)

NAMES = ("none", "fp16", "bf16", "int8", "int4", "sign", "topk:0.1", "randomk:0.1", "powersgd:2")
CODECS = [
    *map(parse, NAMES),
    Quantize(8, block=7, stochastic=True),
    Quantize(4, block=5),
    Sign(block=3),
    RandomK(0.3, unbiased=True),
    Choose(TopK(0.2), below=8, vectors=Quantize(8)),
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(deadline=None, max_examples=60)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_shapes_dtypes_and_bytes(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    tensor = values(shape, seed, dtype)
    before = tensor.clone()
    payload = codec.encode(tensor, draw=seed)
    assert torch.equal(tensor, before)
    assert payload.data.dtype is torch.uint8
    assert payload.data.dim() == 1
    assert payload.num_bytes == codec.payload_bytes(shape, dtype)
    decoded = codec.decode(payload)
    assert decoded.shape == tensor.shape
    assert decoded.dtype is dtype
    assert decoded.isfinite().all()
    assert torch.equal(codec.decode(payload, torch.full_like(tensor, 7)), decoded)
    assert torch.equal(codec.encode(tensor, draw=seed).data, payload.data)
    total = torch.ones_like(tensor)
    codec.accumulate(payload, total)
    assert torch.equal(total, 1 + decoded)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_stay_zeros(codec: Codec) -> None:
    for shape in [(), (0,), (1,), (17,), (8, 40)]:
        assert not codec.decode(codec.encode(torch.zeros(shape), draw=3)).any()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_get_lost(codec: Codec, bad: float) -> None:
    for shape in [(1,), (300,), (16, 48)]:
        tensor = values(shape, 1)
        tensor.view(-1)[-1] = bad
        decoded = codec.decode(codec.encode(tensor, draw=5))
        assert not decoded.isfinite().all()


def test_what_is_not_finite_by_the_stated_rules() -> None:
    tensor = values((600,), 2)
    tensor[300], tensor[10] = math.inf, 5.0
    for codec in (Quantize(8, block=256), Quantize(4, block=256), Sign(block=256)):
        decoded = codec.decode(codec.encode(tensor))
        assert decoded[256:512].isnan().all()
        assert decoded[:256].isfinite().all()
        assert decoded[512:].isfinite().all()
    for codec in (Identity(), Cast(torch.float16), Cast(torch.bfloat16), TopK(0.01)):
        decoded = codec.decode(codec.encode(tensor))
        assert decoded[300] == math.inf
        assert decoded.isfinite().sum() == 599
    kept = RandomK(0.1).decode(RandomK(0.1).encode(tensor))
    assert kept.isnan().sum() == 60
    assert LowRank(1).decode(LowRank(1).encode(tensor.view(20, 30))).isnan().all()


def test_narrow_floats_saturate() -> None:
    tensor = torch.tensor([1e6, -1e6, math.inf, 3e38])
    decoded = Cast(torch.float16).decode(Cast(torch.float16).encode(tensor))
    assert decoded.tolist() == [65504.0, -65504.0, math.inf, 65504.0]


def test_identity_keeps_every_bit() -> None:
    tensor = values((33,), 1, torch.float64)
    assert torch.equal(Identity().decode(Identity().encode(tensor)), tensor)


@settings(deadline=None, max_examples=100)
@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    bits=st.sampled_from([8, 4]),
    block=st.integers(1, 40),
)
def test_quantization_is_off_by_half_a_step(numbers: list[float], bits: int, block: int) -> None:
    tensor = torch.tensor(numbers)
    codec = Quantize(bits, block=block)  # type: ignore[arg-type]
    decoded = codec.decode(codec.encode(tensor))
    for part, result in zip(tensor.split(block), decoded.split(block), strict=True):
        step = part.abs().max() / (127 if bits == 8 else 7)
        assert ((part - result).abs() <= step * 0.5001 + 1e-30).all()


def mean_error(codec: Codec, tensor: Tensor, count: int) -> Tensor:
    total = torch.zeros_like(tensor, dtype=torch.float64)
    for draw in range(count):
        total += codec.decode(codec.encode(tensor, draw=draw)).double()
    return (total / count - tensor.double()).abs()


def test_what_claims_to_be_unbiased_is() -> None:
    tensor = values((40,), 4)
    count = 300
    for codec, spread in (
        (Quantize(8, block=20, stochastic=True), tensor.abs().max() / 127),
        (Quantize(4, block=20, stochastic=True), tensor.abs().max() / 7),
        (RandomK(0.25, unbiased=True), tensor.abs().max() * 3),
    ):
        assert codec.is_unbiased
        assert (mean_error(codec, tensor, count) < 5 * spread / math.sqrt(count)).all()
    assert not Quantize(4).is_unbiased
    assert (mean_error(Quantize(4, block=20), tensor, 50) > tensor.abs().max() / 7 / 4).any()
    assert (mean_error(RandomK(0.25), tensor, 50) > 0.3).any()


def test_sign_has_the_mean_of_each_block() -> None:
    tensor = torch.tensor([1.0, -3.0, 2.0, -6.0, 0.5])
    codec = Sign(block=2)
    assert codec.decode(codec.encode(tensor)).tolist() == [2, -2, 4, -4, 0.5]


def test_topk_keeps_the_largest() -> None:
    tensor = torch.tensor([0.1, -5.0, 2.0, 0.0, 3.0])
    codec = TopK(0.4)
    assert codec.decode(codec.encode(tensor)).tolist() == [0, -5, 0, 0, 3]


def test_randomk_takes_each_element_once_and_all_as_often() -> None:
    codec, numel = RandomK(0.3), 12
    counts = torch.zeros(numel)
    for draw in range(1000):
        kept = codec.decode(codec.encode(torch.ones(numel), draw=draw))
        assert kept.sum() == 4
        counts += kept
    assert ((counts / 1000 - 4 / 12).abs() < 0.08).all()


def test_low_rank_finds_a_matrix_of_that_rank() -> None:
    matrix = values((20, 2), 1) @ values((2, 30), 2)
    codec = LowRank(2)
    payload = codec.encode(matrix)
    assert torch.allclose(codec.decode(payload), matrix, atol=1e-4)


def test_low_rank_gets_better_from_where_it_was() -> None:
    left, right = torch.linalg.qr(values((40, 20), 1)).Q, torch.linalg.qr(values((30, 20), 2)).Q
    matrix = left @ torch.diag(0.8 ** torch.arange(20)) @ right.T
    best = torch.linalg.svdvals(matrix)[2:].norm()
    codec = LowRank(2)
    payload = codec.encode(matrix)
    errors = [(codec.decode(payload) - matrix).norm()]
    for _ in range(30):
        payload = codec.encode(matrix, previous=payload)
        errors.append((codec.decode(payload) - matrix).norm())
    assert errors[-1] < errors[0] * 0.95
    assert errors[-1] < best * 1.001


def test_low_rank_goes_on_after_nan_and_zeros() -> None:
    codec, matrix = LowRank(2), values((20, 2), 1) @ values((2, 30), 2)
    payload = codec.encode(matrix)
    for bad in (torch.full_like(matrix, math.nan), torch.zeros_like(matrix)):
        payload = codec.encode(bad, previous=payload)
    for _ in range(2):
        payload = codec.encode(matrix, previous=payload)
    assert torch.allclose(codec.decode(payload), matrix, atol=1e-4)


def test_low_rank_leaves_vectors_and_small_matrices() -> None:
    codec = LowRank(2)
    for shape in [(50,), (3, 4), (1, 100)]:
        tensor = values(shape, 1)
        assert torch.equal(codec.decode(codec.encode(tensor)), tensor)
        assert codec.payload_bytes(shape, torch.float32) == -(-tensor.nbytes // 8) * 8
    assert codec.payload_bytes((64, 32, 3, 3), torch.float32) == (64 + 288) * 2 * 4


def test_choose_by_name_size_and_role() -> None:
    codec = Choose(
        LowRank(2), below=100, vectors=Quantize(8), names={"head.*": Cast(torch.float16)}
    )
    assert codec.for_tensor("head.weight", (5, 5)) == Cast(torch.float16)
    assert codec.for_tensor("body.weight", (5, 5)) == Identity()
    assert codec.for_tensor("body.bias", (500,)) == Quantize(8)
    assert codec.for_tensor("body.weight", (50, 50)) == LowRank(2)
    sparse = Choose(TopK(0.01))
    assert sparse.for_tensor("body.weight", (50, 50)) == TopK(0.01)
    assert sparse.for_tensor("body.bias", (5000,)) == Identity()
    always = Choose(TopK(0.01), vectors=TopK(0.01))
    assert always.for_tensor("body.bias", (5000,)) == TopK(0.01)
    with pytest.raises(ValueError, match="decides once"):
        Choose(codec)


def test_parse() -> None:
    assert parse("int4") == Quantize(4)
    assert parse("powersgd:3") == LowRank(3)
    assert parse("topk:0.5") == TopK(0.5)
    assert parse(TopK(0.5)) == TopK(0.5)
    for name in NAMES:
        assert str(parse(name)) == name


@pytest.mark.parametrize(
    "text", ["int2", "topk", "topk:", "topk:2", "topk:x", "powersgd:0", "powersgd:1.5", "int8:3"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="compression") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


def test_parse_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"a whole number from 1 on; got '1\.5'"):
        parse("powersgd:1.5")
    with pytest.raises(ValueError, match=r"such as 0\.01; got 'x'"):
        parse("topk:x")


class Plain(Codec):
    """What a user writes: nothing but what `Codec` asks for."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(torch.float32, shape.numel())]

    def encode(self, tensor: Tensor, *, draw: int = 0, previous: Payload | None = None) -> Payload:
        payload, (values,) = self._allocate(tensor)
        values.copy_(tensor.reshape(-1) * self.factor)
        return payload

    def _decode_into(self, payload: Payload, out: Tensor) -> None:
        out.copy_(self._views(payload)[0])


def test_a_codec_of_a_user_says_what_it_is_in_the_same_words_everywhere() -> None:
    assert repr(Plain(2.0)) == repr(Plain(2.0)) == "Plain(factor=2.0)"
    assert repr(TopK(0.1)) == "TopK(ratio=0.1)"


def test_wrong_values_are_refused() -> None:
    for make in (
        lambda: Quantize(3),  # type: ignore[arg-type]
        lambda: Quantize("8"),  # type: ignore[arg-type]
        lambda: Quantize(8, block=2.5),  # type: ignore[arg-type]
        lambda: LowRank(1.5),  # type: ignore[arg-type]
        lambda: TopK("0.1"),  # type: ignore[arg-type]
        lambda: Choose(Quantize(8), below=-1),
        lambda: Cast(torch.float32),
        lambda: TopK(0),
        lambda: Sign(0),
        lambda: LowRank(0),
    ):
        with pytest.raises(ValueError, match="got"):
            make()
    with pytest.raises(TypeError, match="real floating"):
        Quantize(8).encode(torch.zeros(3, dtype=torch.complex64))
    for chosen in (
        lambda: Choose("int8"),  # type: ignore[arg-type]
        lambda: Choose(Quantize(8), names={"a": "int8"}),  # type: ignore[dict-item]
        lambda: Choose(Quantize(8), names=["a"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="codec"):
            chosen()
    with pytest.raises(TypeError, match="compression must be"):
        parse(8)  # type: ignore[arg-type]
    payload = Quantize(8).encode(torch.zeros(3))
    with pytest.raises(ValueError, match="out must be"):
        Quantize(8).decode(payload, torch.zeros(4))
    with pytest.raises(ValueError, match="bytes"):
        Quantize(8).decode(Payload(payload.data[:8], payload.shape, payload.dtype))


def test_payloads_lie_one_behind_the_other() -> None:
    tensors = [values((numel,), numel) for numel in (5, 9, 1, 300)]
    for codec in map(parse, NAMES):
        payloads = [codec.encode(tensor) for tensor in tensors]
        joined = torch.cat([payload.data for payload in payloads])
        start = 0
        for payload in payloads:
            part = joined[start : start + payload.num_bytes]
            start += payload.num_bytes
            again = Payload(part, payload.shape, payload.dtype)
            assert torch.equal(codec.decode(again), codec.decode(payload))


def test_low_rank_does_not_depend_on_the_default_dtype():
    tensor, before = torch.randn(8, 6), torch.get_default_dtype()
    wanted = LowRank(2).decode(LowRank(2).encode(tensor))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(LowRank(2).decode(LowRank(2).encode(tensor)), wanted)
    finally:
        torch.set_default_dtype(before)

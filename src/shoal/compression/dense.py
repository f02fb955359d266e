"""Codecs that keep something of each element: a narrower dtype, a few bits, the sign."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CompressedTensor, Form, Section, check_whole

# Below this a block counts as zero: its scale would be too small to divide by.
_SMALLEST = 2.0**-100


@dataclass(frozen=True)
class Identity(Codec):
    """Every bit, uncompressed. What is not finite stays what it is."""

    form = Form.DENSE
    joins_tensors = True

    def __str__(self) -> str:
        return "none"

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """The elements."""
        return [(dtype, shape.numel())]

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """A copy."""
        payload, (values,) = self._allocate(tensor)
        values.copy_(tensor.reshape(-1))
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        out.copy_(self._views(payload)[0])


@dataclass(frozen=True)
class Cast(Codec):
    """A narrower floating dtype.

    Finite numbers stay finite: those beyond the dtype's range become its largest. NaN and
    infinities stay what they are.
    """

    dtype: torch.dtype = torch.bfloat16

    form = Form.DENSE
    joins_tensors = True

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Cast is to torch.float16 or torch.bfloat16; got {self.dtype!r}")

    def __str__(self) -> str:
        return "fp16" if self.dtype is torch.float16 else "bf16"

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """The elements, in the narrower of both dtypes."""
        return [(self.dtype if dtype.itemsize > 2 else dtype, shape.numel())]

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """Each element rounded to nearest."""
        payload, (values,) = self._allocate(tensor)
        flat = tensor.reshape(-1)
        values.copy_(flat)
        if values.dtype is not flat.dtype and _may_exceed(flat, values.dtype):
            limits = torch.finfo(values.dtype)
            is_infinite = flat.isinf()
            values.copy_(torch.where(is_infinite, values, values.clamp(limits.min, limits.max)))
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        out.copy_(self._views(payload)[0])


@dataclass(frozen=True)
class Quantize(Codec):
    """Whole numbers of 8 or 4 bits, and a scale for each block of elements.

    A number is off by half a step at most; a step is the 127th (with 4 bits the 7th) part of the
    largest in its block. Zeros stay zeros. With ``stochastic`` rounding it is up to a step, and
    right on average. A block with a NaN or an infinity becomes NaN as a whole.

    Attributes:
        bits: 8 or 4.
        block: How many elements share a scale; by default 256 with 8 bits and 64 with 4.
        stochastic: Whether numbers between two steps go up or down at random.
    """

    bits: Literal[8, 4] = 8
    block: int = 0
    stochastic: bool = False

    form = Form.DENSE
    joins_tensors = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"Quantize is to 8 or 4 bits; got {self.bits!r}")
        check_whole("block", self.block, 0)
        if not self.block:
            object.__setattr__(self, "block", 256 if self.bits == 8 else 64)

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def is_unbiased(self) -> bool:
        """Whether what is decoded is right on average."""
        return self.stochastic

    @property
    def _most(self) -> int:
        return 127 if self.bits == 8 else 7

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """A scale for each block, and the codes."""
        numel = shape.numel()
        codes = numel if self.bits == 8 else -(-numel // 2)
        return [
            (torch.float32, -(-numel // self.block)),
            (torch.int8 if self.bits == 8 else torch.uint8, codes),
        ]

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """The nearest whole number of steps, or one of both neighbours at random."""
        payload, (scales, codes) = self._allocate(tensor)
        flat = tensor.reshape(-1).float()
        noise = _uniform(flat, draw) if self.stochastic else None
        target = codes if self.bits == 8 else torch.empty_like(flat, dtype=torch.int8)
        for part, at, shape in _blocks(self.block, flat.numel()):
            rows = flat[part].view(shape)
            low, high = torch.aminmax(rows, dim=1)
            largest = torch.maximum(high, low.neg_())
            largest[largest < _SMALLEST] = 0
            # Infinity times zero, or a NaN, is a NaN; a finite number stays as it is.
            largest.add_(largest * 0)
            scales[at] = largest / self._most
            inverse = torch.where(largest == 0, 0.0, self._most / largest)
            steps = rows * inverse.unsqueeze(1)
            steps = (
                steps.round_() if noise is None else steps.add_(noise[part].view(shape)).floor_()
            )
            target[part].view(shape).copy_(steps.clamp_(-self._most, self._most))
        if self.bits == 4:
            codes.copy_(_pack_nibbles(target))
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        scales, codes = self._views(payload)
        if self.bits == 4:
            codes = _unpack_nibbles(codes, out.numel())
        _scale(codes, scales, self.block, out)


@dataclass(frozen=True)
class Sign(Codec):
    """One bit for each element, and for each block the mean of the absolute values.

    A zero becomes plus the mean. A block with a NaN or an infinity becomes NaN as a whole.

    Attributes:
        block: How many elements share a scale.
    """

    block: int = 64

    form = Form.DENSE

    def __post_init__(self) -> None:
        check_whole("block", self.block, 1)

    def __str__(self) -> str:
        return "sign"

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """A scale for each block, and eight elements in a byte."""
        numel = shape.numel()
        return [(torch.float32, -(-numel // self.block)), (torch.uint8, -(-numel // 8))]

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """Whether each element is negative."""
        payload, (scales, bits) = self._allocate(tensor)
        flat = tensor.reshape(-1).float()
        for part, at, shape in _blocks(self.block, flat.numel()):
            means = flat[part].view(shape).abs().mean(dim=1)
            scales[at] = means.add_(means * 0)
        bits.copy_(_pack_bits(flat < 0))
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        scales, bits = self._views(payload)
        signs = 1 - 2 * _unpack_bits(bits, out.numel()).view(torch.int8)
        _scale(signs, scales, self.block, out)


# Blocks and bits ------------------------------------------------------------------------------


def _blocks(block: int, numel: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """All whole blocks, then what is left over: which elements, which scales, how many by what."""
    whole = numel // block
    if whole:
        yield slice(0, whole * block), slice(0, whole), (whole, block)
    if numel % block:
        yield slice(whole * block, numel), slice(whole, whole + 1), (1, numel % block)


def _scale(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Numbers of 8 bits times the scale of their block."""
    for part, at, shape in _blocks(block, out.numel()):
        numbers, steps = codes[part].view(shape), scales[at].unsqueeze(1)
        if out.dtype is torch.float32:
            torch.mul(numbers, steps, out=out[part].view(shape))
        else:
            out[part].view(shape).copy_(numbers * steps)


def _may_exceed(flat: Tensor, dtype: torch.dtype) -> bool:
    """Whether something may be too large for a dtype; a GPU is not asked, which would take long."""
    if not flat.is_cpu or not flat.numel():
        return True
    low, high = torch.aminmax(flat)
    limits = torch.finfo(dtype)
    return not (low >= limits.min and high <= limits.max)


def _uniform(like: Tensor, draw: int) -> Tensor:
    """Numbers from 0 to 1, the same ones for the same ``draw``."""
    generator = torch.Generator(like.device)
    generator.manual_seed(draw)
    return torch.rand(like.shape, generator=generator, device=like.device)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Two numbers from -8 to 7 in a byte."""
    shifted = codes.add(8).view(torch.uint8)
    if shifted.numel() % 2:
        shifted = torch.nn.functional.pad(shifted, (0, 1))
    return shifted[0::2] | (shifted[1::2] << 4)


def _unpack_nibbles(packed: Tensor, numel: int) -> Tensor:
    pairs = torch.stack((packed & 15, packed >> 4), dim=1)
    return pairs.view(-1)[:numel].view(torch.int8) - 8


# Eight bytes of which each is 0 or 1 are one number of 64 bits. Multiplied with the first constant,
# its highest byte has one bit of each. The second puts a byte into each of eight, of which the
# third keeps another bit in each.
_GATHER_BITS = 0x0102040810204080
_REPEAT_BYTE = 0x0101010101010101
_ONE_BIT_EACH = 0x8040201008040201 - (1 << 64)


def _pack_bits(bits: Tensor) -> Tensor:
    """Eight booleans in a byte."""
    missing = -bits.numel() % 8
    if missing:
        bits = torch.nn.functional.pad(bits, (0, missing))
    words = bits.view(torch.uint8).view(torch.int64)
    return (words * _GATHER_BITS >> 56).to(torch.uint8)


def _unpack_bits(packed: Tensor, numel: int) -> Tensor:
    words = packed.to(torch.int64) * _REPEAT_BYTE & _ONE_BIT_EACH
    return words.view(torch.uint8)[:numel] != 0

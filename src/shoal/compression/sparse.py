"""Codecs that keep some of the elements: the largest, or any."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CompressedTensor, Form, Section
from shoal.compression.dense import Identity

_MOST_INT32 = 2**31


class _Sparse(Codec):
    """What codecs that keep some of the elements share."""

    form = Form.SPARSE

    def for_tensor(self, name: str, shape: Sequence[int]) -> Codec:
        """Itself for matrices; biases and norms are few, and cost much when they come late."""
        return self if len(shape) > 1 else Identity()


@dataclass(frozen=True)
class TopK(_Sparse):
    """The largest elements as they are, with their places; the others become zero.

    A model's vectors, such as biases and norms, are not compressed; see `Choose` for those.

    NaN counts as larger than infinity and infinity as larger than all else: what is not finite is
    kept first, as it is.

    Attributes:
        ratio: Which part of the elements is kept; at least one is.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def __str__(self) -> str:
        return f"topk:{self.ratio:g}"

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """Places, and elements."""
        count = num_kept(shape, self.ratio)
        places = torch.int32 if shape.numel() < _MOST_INT32 else torch.int64
        return [(places, count), (dtype, count)]

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """The largest by absolute value, in the order of their places."""
        payload, (places, values) = self._allocate(tensor)
        flat = tensor.reshape(-1)
        if values.numel():
            largest = flat.abs().topk(values.numel(), sorted=False).indices.sort().values
            places.copy_(largest)
            torch.index_select(flat, 0, largest, out=values)
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        places, values = self._views(payload)
        out.zero_().index_copy_(0, places.long(), values)

    def accumulate(self, payload: CompressedTensor, into: Tensor) -> None:
        """Adds the elements in their places."""
        places, values = self._views(payload)
        into.view(-1).index_add_(0, places.long(), values)


@dataclass(frozen=True)
class RandomK(_Sparse):
    """Some elements as they are, chosen at random, each as likely; the others become zero.

    The places are an arithmetic progression with a random start and a random stride, so two numbers
    say all of them. If anything is not finite, all elements that are kept become NaN. A model's
    vectors, such as biases and norms, are not compressed; see `Choose` for those.

    Attributes:
        ratio: Which part of the elements is kept; at least one is.
        unbiased: Whether what is kept is made larger, so that the result is right on average.
    """

    ratio: float = 0.01
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def __str__(self) -> str:
        return f"randomk:{self.ratio:g}"

    @property
    def is_unbiased(self) -> bool:
        """Whether what is decoded is right on average."""
        return self.unbiased

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """Start and stride, and elements."""
        return [(torch.int64, 2), (dtype, num_kept(shape, self.ratio))]

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """Chosen by ``draw``."""
        payload, (progression, values) = self._allocate(tensor)
        flat, numel = tensor.reshape(-1), tensor.numel()
        if not numel:
            return payload
        chance = random.Random(draw)
        start, stride = chance.randrange(numel), chance.randrange(1, numel + 1)
        while math.gcd(stride, numel) > 1:  # so that no place comes twice
            stride = chance.randrange(1, numel + 1)
        progression.copy_(torch.tensor([start, stride]))
        kept = flat[_places(progression, values.numel(), numel)]
        if self.unbiased:
            kept = kept * (numel / values.numel())
        low, high = torch.aminmax(flat)  # a NaN is both
        values.copy_(torch.where(low.isfinite() & high.isfinite(), kept, torch.nan))
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        progression, values = self._views(payload)
        out.zero_()
        if values.numel():
            out.index_copy_(0, _places(progression, values.numel(), out.numel()), values)

    def accumulate(self, payload: CompressedTensor, into: Tensor) -> None:
        """Adds the elements in their places."""
        progression, values = self._views(payload)
        if values.numel():
            places = _places(progression, values.numel(), into.numel())
            into.view(-1).index_add_(0, places, values)


def _places(progression: Tensor, count: int, numel: int) -> Tensor:
    steps = torch.arange(count, device=progression.device)
    return (progression[0] + steps * progression[1]) % numel


def num_kept(shape: torch.Size, ratio: float) -> int:
    """How many elements are kept; of none, none."""
    numel = shape.numel()
    return min(numel, max(1, math.ceil(numel * ratio))) if numel else 0


def check_ratio(ratio: object) -> None:
    """Refuses what is no part of a whole."""
    if not isinstance(ratio, float | int) or not 0 < ratio <= 1:
        raise ValueError(f"ratio is the part that is kept, above 0 and at most 1; got {ratio!r}")

"""`Codec`: a tensor as bytes and back, with a known number of bytes.

[Note: what is not finite]
A NaN or an infinity must not get lost on the way: whoever scales losses looks for it and leaves out
the step. So each codec says what becomes of one, and never makes a finite number of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

# Every section of a payload begins at a multiple of this, so that it can be viewed as any dtype,
# also where payloads lie one behind the other.
_ALIGNMENT_BYTES = 8

Section = tuple[torch.dtype, int]
"""A run of elements of one dtype in a payload: the dtype, and how many."""


class Form(StrEnum):
    """What a payload consists of, which decides how those of several ranks are added up."""

    DENSE = "dense"  # something for each element; a sum of several is encoded anew
    SPARSE = "sparse"  # some of the elements; payloads are added up where they are decoded
    FACTORS = "factors"  # of a matrix; factors of several ranks are added up as they are


@dataclass(frozen=True)
class CompressedTensor:
    """A payload: the bytes that one tensor became, and what it takes to decode them."""

    data: Tensor  # flat, of dtype uint8, where the tensor was
    shape: torch.Size  # of the tensor
    dtype: torch.dtype  # of the tensor

    @property
    def num_bytes(self) -> int:
        """How many bytes travel."""
        return self.data.numel()


class Codec(ABC):
    """Makes a tensor of real floating numbers into fewer bytes, and something like it of them.

    Example:
        >>> codec = Quantize(8)
        >>> payload = codec.encode(torch.randn(1000))
        >>> payload.num_bytes == codec.payload_bytes((1000,), torch.float32)
        True
        >>> codec.decode(payload).shape
        torch.Size([1000])
    """

    form: ClassVar[Form] = Form.DENSE
    joins_tensors: ClassVar[bool] = False
    """Whether several tensors may be encoded as one, because a zero always stays a zero."""

    def __repr__(self) -> str:
        """What it is made of: the same on every rank, because ranks compare it."""
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({options})"

    @abstractmethod
    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """What the payload of such a tensor consists of."""

    @abstractmethod
    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """The tensor as bytes.

        Args:
            tensor: Of real floating numbers; it stays as it is.
            draw: What random choices are made from: the same number, the same choices.
            previous: The payload of a similar tensor, to start from; `LowRank` gets better by it.
        """

    @abstractmethod
    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        """Overwrites ``out``, which is flat and has the payload's dtype."""

    def decode(self, payload: CompressedTensor, out: Tensor | None = None) -> Tensor:
        """What the bytes stand for, in ``out`` if there is one."""
        if out is None:
            out = torch.empty(payload.shape, dtype=payload.dtype, device=payload.data.device)
        elif out.shape != payload.shape or out.dtype != payload.dtype:
            raise ValueError(
                f"out must be {_described(payload.shape, payload.dtype)}, as what was encoded; "
                f"got {_described(out.shape, out.dtype)}"
            )
        if not out.is_contiguous():
            return out.copy_(self.decode(payload))
        self._decode_into(payload, out.view(-1))
        return out

    def accumulate(self, payload: CompressedTensor, into: Tensor) -> None:
        """Adds what the bytes stand for to a tensor."""
        into.add_(self.decode(payload))

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """How many bytes a tensor of this shape and dtype becomes, always."""
        return sum(
            padded(kind.itemsize * count) for kind, count in self.sections(torch.Size(shape), dtype)
        )

    def for_tensor(self, name: str, shape: Sequence[int]) -> Codec:
        """The codec for one tensor of a model; itself, if it does not choose."""
        return self

    # For codecs ---------------------------------------------------------------------------

    def _allocate(self, tensor: Tensor) -> tuple[CompressedTensor, list[Tensor]]:
        """A payload for a tensor, and its sections to write to."""
        check_tensor(tensor)
        num_bytes = self.payload_bytes(tensor.shape, tensor.dtype)
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=tensor.device)
        payload = CompressedTensor(data, tensor.shape, tensor.dtype)
        return payload, self._views(payload)

    def _views(self, payload: CompressedTensor) -> list[Tensor]:
        """The sections of a payload."""
        views, start = [], 0
        for dtype, count in self.sections(payload.shape, payload.dtype):
            stop = start + dtype.itemsize * count
            views.append(payload.data[start:stop].view(dtype))
            start += padded(stop - start)
        if start != payload.num_bytes:
            raise ValueError(
                f"the payload of {_described(payload.shape, payload.dtype)} has {start} bytes with "
                f"{self}; got {payload.num_bytes}"
            )
        return views


def padded(num_bytes: int) -> int:
    """Up to where the next section begins."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def check_whole(name: str, value: object, least: int) -> None:
    """Refuses what is no whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number from {least} on; got {value!r}")


def check_tensor(tensor: Tensor) -> None:
    """Refuses what is not made of real floating numbers."""
    if not tensor.is_floating_point():
        raise TypeError(
            "compression is for tensors of real floating numbers; got "
            f"{_described(tensor.shape, tensor.dtype)}"
        )


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"

"""`Choose`: another codec for each tensor, by its name, its role or its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CompressedTensor, Form, Section, check_whole
from shoal.compression.dense import Identity


@dataclass(frozen=True)
class Choose(Codec):
    """Decides by the first that applies: a name, then a small size, then being a vector.

    Small tensors stay uncompressed unless another codec is given for them; their bytes count like
    all others.

    Attributes:
        codec: For all other tensors.
        below: Tensors of fewer elements are small.
        small: For small tensors.
        vectors: For tensors of fewer than two dimensions, such as biases and norms; by default
            what ``codec`` does with those: sparse and low-rank ones send them as they are.
        names: Codecs by the full name of a parameter, which may have wildcards: ``"*.bias"``.

    Example:
        >>> codec = Choose(LowRank(2), below=4096, names={"embedding.*": TopK(0.01)})
        >>> codec.for_tensor("embedding.weight", (5000, 64))
        TopK(ratio=0.01)
    """

    codec: Codec
    below: int = 1024
    small: Codec = field(default_factory=Identity)
    vectors: Codec | None = None
    names: Mapping[str, Codec] = field(default_factory=dict)

    form = Form.DENSE  # of no meaning: what it chooses has a form

    def __post_init__(self) -> None:
        check_whole("below", self.below, 0)
        if not isinstance(self.names, Mapping):
            raise TypeError(f"names says the codec of each name, as a dict; got {self.names!r}")
        chosen = (self.codec, self.small, self.vectors or self.codec, *self.names.values())
        for each in chosen:
            if not isinstance(each, Codec):
                raise TypeError(
                    f"Choose takes codecs, such as Quantize(8) or parse('int8'); got {each!r}"
                )
        if any(isinstance(each, Choose) for each in chosen):
            raise ValueError("Choose decides once: give it codecs that do not choose themselves")

    def __str__(self) -> str:
        return f"{self.codec} and others"

    def for_tensor(self, name: str, shape: Sequence[int]) -> Codec:
        """The codec for one tensor of a model."""
        for pattern, codec in self.names.items():
            if fnmatchcase(name, pattern):
                return codec
        if torch.Size(shape).numel() < self.below:
            return self.small
        if len(shape) < 2 and self.vectors is not None:
            return self.vectors
        return self.codec.for_tensor(name, shape)

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """Those of the codec for a tensor without a name."""
        return self.for_tensor("", shape).sections(shape, dtype)

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """By the codec for a tensor without a name."""
        return self.for_tensor("", tensor.shape).encode(tensor, draw=draw, previous=previous)

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        self.for_tensor("", payload.shape).decode(payload, out.view(payload.shape))

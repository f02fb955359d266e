"""`LowRank`: a matrix as the product of two thin ones (PowerSGD, arXiv:1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CompressedTensor, Form, Section, check_whole


@dataclass(frozen=True)
class LowRank(Codec):
    """Two factors of a matrix, found by one step of power iteration from those of the last time.

    A tensor of more dimensions is a matrix of as many rows as its first dimension has. Vectors, and
    matrices that the factors would not make smaller, stay as they are. If anything is not finite,
    all of the matrix becomes NaN.

    Attributes:
        rank: How many columns the factors have.
    """

    rank: int = 2

    form = Form.FACTORS

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1)

    def __str__(self) -> str:
        return f"powersgd:{self.rank}"

    def sections(self, shape: torch.Size, dtype: torch.dtype) -> Sequence[Section]:
        """The factors, or the elements."""
        if not self.factors(shape):
            return [(dtype, shape.numel())]
        rows, columns = _matrix_shape(shape)
        return [(torch.float32, rows * self.rank), (torch.float32, columns * self.rank)]

    def factors(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is factored."""
        if len(shape) < 2:
            return False
        rows, columns = _matrix_shape(shape)
        is_smaller = (rows + columns) * self.rank < rows * columns
        return is_smaller and self.rank <= min(rows, columns)

    def encode(
        self, tensor: Tensor, *, draw: int = 0, previous: CompressedTensor | None = None
    ) -> CompressedTensor:
        """One step of power iteration, from the factors of ``previous``."""
        payload, views = self._allocate(tensor)
        if len(views) == 1:
            views[0].copy_(tensor.reshape(-1))
            return payload
        right = self.start(tensor.shape, tensor.device)
        if previous is not None:
            right = self.usable(self._views(previous)[1].view_as(right), right)
        left = orthonormal(self.left(tensor, right))
        views[0].copy_(left.reshape(-1))
        views[1].copy_(self.right(tensor, left).reshape(-1))
        return payload

    def _decode_into(self, payload: CompressedTensor, out: Tensor) -> None:
        views = self._views(payload)
        if len(views) == 1:
            out.copy_(views[0])
            return
        left, right = (view.view(-1, self.rank) for view in views)
        out.view(left.shape[0], -1).copy_(left @ right.T)

    # The steps of the iteration, for ranks that add their factors up in between ------------

    def start(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Where the iteration begins: a right factor that is the same everywhere."""
        _, columns = _matrix_shape(shape)
        generator = torch.Generator().manual_seed(columns)
        start = torch.randn(columns, self.rank, generator=generator, dtype=torch.float32)
        return start.to(device)

    def left(self, tensor: Tensor, right: Tensor) -> Tensor:
        """The left factor, not orthonormal yet; NaN as a whole if anything is not finite."""
        product = tensor.reshape(tensor.shape[0], -1).float() @ right
        return torch.where(product.isfinite().all(), product, torch.nan)

    def right(self, tensor: Tensor, left: Tensor) -> Tensor:
        """The right factor for an orthonormal left one."""
        return tensor.reshape(tensor.shape[0], -1).float().T @ left

    @staticmethod
    def usable(right: Tensor, start: Tensor) -> Tensor:
        """A right factor to go on with, unless it is not finite."""
        return torch.where(right.isfinite().all(), right, start)


def orthonormal(left: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``left``, and others where it has too few."""
    is_finite = left.isfinite().all()
    return torch.where(is_finite, torch.linalg.qr(left.nan_to_num(0, 0, 0)).Q, torch.nan)


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], torch.Size(shape[1:]).numel()

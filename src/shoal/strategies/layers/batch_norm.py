"""BatchNorm over the batches of all ranks, so that many ranks train as one process would.

Layers stay the objects they are, with their parameters, buffers and names; only their class
becomes one whose training takes the statistics of all ranks' rows. Ranks may have different
numbers of rows, or of places in an image.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm import Backend, ReduceOp
from shoal.comm.operation import AllGather, AllReduce
from shoal.torch_internals.modules import BatchNorm, check_input_dim


class Assembly:
    """Where the layers of one model meet: ranks of their own, in no order with other traffic."""

    def __init__(self, backend: Backend) -> None:
        """All ranks call it. The layers keep it, so the lane is theirs while there is one."""
        self.group = backend.lane(self)


def check_layers(module: nn.Module) -> None:
    """Refuses layers whose computation is unknown."""
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and type(layer).forward not in _KNOWN:
            raise TypeError(
                f"sync_batchnorm=True cannot synchronize {name or 'the model itself'}: "
                f"{type(layer).__name__} has a forward of its own. Use torch.nn.BatchNorm1d, 2d or "
                "3d, or a subclass that leaves forward alone"
            )


def check_plain_layers(module: nn.Module) -> None:
    """Refuses torch's own synchronized layers where they would silently be plain ones."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"{name or 'the model itself'} is a torch.nn.SyncBatchNorm, which synchronizes "
                "over torch.distributed only, and that is not initialized: use BatchNorm and wrap "
                "with sync_batchnorm=True"
            )


def synchronize(module: nn.Module, backend: Backend) -> None:
    """Makes every BatchNorm of a model see the batches of all ranks; all of them call it."""
    assembly = Assembly(backend)
    for name, found in module.named_modules():
        if isinstance(found, BatchNorm):
            layer: Any = found
            layer.__class__ = _synchronized(layer.__class__)
            layer.assembly, layer.place = assembly, name


class SynchronizedBatchNorm(BatchNorm):
    """What `synchronize` makes of a BatchNorm, beside the class that it was."""

    assembly: Assembly
    place: str

    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the statistics of all ranks' rows; outside training as ever."""
        group = self.assembly.group
        if not self.training or group.size == 1:
            return super().forward(input)
        check_input_dim(self, input)
        # As torch does it: in 16 bits the sums are kept in 32.
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        with torch.no_grad():
            count, mean, squares = _statistics(x, group, self.place)
            if count == 1:
                raise ValueError(
                    f"BatchNorm {self.place!r} needs more than one value per channel to train; "
                    "all ranks together have one"
                )
            self._track(count, mean, squares)
            scale = (squares / max(count, 1) + self.eps).rsqrt()
        normal = _Normalize.apply(x, mean.to(x.dtype), scale.to(x.dtype), count, group, self.place)
        return self._adapt(normal).to(input.dtype)

    def _track(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Running statistics, the same on every rank."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the plain average of all batches
                factor = 1.0 / float(self.num_batches_tracked)
        if count:
            for running, new in (
                (self.running_mean, mean),
                (self.running_var, squares / (count - 1)),
            ):
                running.lerp_(new.to(running.dtype), factor or 0.0)

    def _adapt(self, normal: Tensor) -> Tensor:
        """The learnt scale and shift."""
        if self.weight is not None:
            normal = normal * _along_channels(self.weight.to(normal.dtype), normal)
        if self.bias is not None:
            normal = normal + _along_channels(self.bias.to(normal.dtype), normal)
        return normal


_KNOWN = (BatchNorm.forward, SynchronizedBatchNorm.forward)


@cache
def _synchronized(kind: type[BatchNorm]) -> Any:
    """The class behind ``kind`` in its methods' order, so what a subclass changes still holds."""
    if issubclass(kind, SynchronizedBatchNorm):
        return kind
    return type(f"Synchronized{kind.__name__}", (kind, SynchronizedBatchNorm), {})


def _statistics(x: Tensor, group: Backend, place: str) -> tuple[int, Tensor, Tensor]:
    """Number of values per channel, their mean, and the sum of squared distances from it."""
    channels = x.shape[1]
    num_own = x.numel() // channels if channels else 0
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if num_own:
        variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
        own[0] = num_own
        own[1 : 1 + channels] = mean
        own[1 + channels :] = variance.double() * num_own
    operation = AllGather(own.unsqueeze(0), None)
    operation.signature += f" for the statistics of BatchNorm {place!r}"
    counts, means, squares = group.run(operation).split([1, channels, channels], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    # Each rank's squares are about its own mean.
    total = (squares + counts * (means - mean).square()).sum(0)
    return int(count), mean, total


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1 for _ in range(x.dim() - 2)))


class _Normalize(torch.autograd.Function):
    """Zero mean and unit variance, by statistics to which every rank's rows contribute.

    So every rank's gradient depends on all ranks' losses: two sums per channel are reduced.
    """

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Tensor: ...

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, count: int, group: Backend, place: str
    ) -> Tensor:
        normal = (x - _along_channels(mean, x)) * _along_channels(scale, x)
        ctx.save_for_backward(normal, scale)
        ctx.count, ctx.group, ctx.place = count, group, place
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, (normal, scale) = gradients[0], ctx.saved_tensors
        dims = _all_but_channels(normal)
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        operation = AllReduce(sums, ReduceOp.SUM)
        operation.signature += f" for the gradients of BatchNorm {ctx.place!r}"
        plain, projected = ctx.group.run(operation) / max(ctx.count, 1)
        along = _along_channels(plain, normal) + normal * _along_channels(projected, normal)
        return (gradient - along) * _along_channels(scale, normal), None, None, None, None, None

"""One process that does what the ranks of strategy "local" do: replicas, averaged now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.stepping.kernels import fused_where_free
from shoal.strategies.layers.precision import parse_precision
from shoal.torch_support.dtypes import SUMMED_IN
from shoal.verification.trainers.one_process import WholeBatch, average_buffer, rank_stream
from shoal.verification.trainers.trainer import Build, Observed, Setup, Trainer, share


class Replica(WholeBatch):
    """One rank's replica, on its rows of each batch and with its random numbers."""

    def __init__(
        self,
        build: Build,
        num_steps: int,
        rank: int,
        num_ranks: int,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(build, num_steps, compute_dtype=compute_dtype)
        self._kernels = contextlib.nullcontext if compute_dtype else fused_where_free
        self.setup.batches = [share(batch, rank, num_ranks) for batch in self.setup.batches]
        self._stream = rank_stream(rank)

    def update(self, step: int) -> None:
        """The optimizers' step, with the kernels that ranks use."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.setup.optimizers:
                stack.enter_context(self._kernels(optimizer))
            super().update(step)


class LocalReplay(Trainer):
    """All ranks' replicas, one after the other; what rank 0 has is what is compared."""

    def __init__(
        self, build: Build, num_steps: int, num_ranks: int, options: Mapping[str, Any]
    ) -> None:
        """``options`` are those of the strategy."""
        dtype = parse_precision(options.get("mixed_precision"))
        self._replicas = [
            Replica(build, num_steps, rank, num_ranks, dtype) for rank in range(num_ranks)
        ]
        self.setup = self._replicas[0].setup
        self._every, self._averages_buffers = options["every"], bool(options.get("average_buffers"))
        self._agreed = [
            [nn.Parameter(each.detach().clone()) for each in own] for own in _stepped(self.setup)
        ]
        make = options.get("outer")
        self._outer: list[Optimizer | None] = [
            None if make is None else make(own) for own in self._agreed
        ]

    def compute(self, step: int) -> Tensor:
        """Every replica's forward and backward; rank 0's loss."""
        losses = [replica.compute(step) for replica in self._replicas]
        return losses[0]

    def gradients(self) -> Iterator[Observed]:
        """Rank 0's."""
        return self._replicas[0].gradients()

    def parameters(self) -> Iterator[Observed]:
        """Rank 0's."""
        return self._replicas[0].parameters()

    def update(self, step: int) -> None:
        """Every replica's steps, and the average at the end of a round."""
        for replica in self._replicas:
            replica.update(step)
        if (step + 1) % self._every == 0:
            with torch.no_grad():
                self._average()

    def forget(self) -> None:
        """No gradients any more."""
        for replica in self._replicas:
            replica.forget()

    def _average(self) -> None:
        everywhere = [_stepped(replica.setup) for replica in self._replicas]
        for number, (outer, agreed) in enumerate(zip(self._outer, self._agreed, strict=True)):
            by_parameter = list(zip(*(own[number] for own in everywhere), strict=True))
            for parameter, replicas in zip(agreed, by_parameter, strict=True):
                if outer is None:
                    parameter.copy_(_mean(replicas))
                else:
                    change = _mean([parameter - each for each in replicas])
                    parameter.grad = change if change.any() else None
            if outer is not None:
                outer.step()
            for parameter, replicas in zip(agreed, by_parameter, strict=True):
                _set_all(replicas, parameter)
        buffers = [replica.setup.model.buffers() for replica in self._replicas]
        for of_ranks in zip(*buffers, strict=True):
            value = average_buffer(of_ranks) if self._averages_buffers else of_ranks[0].clone()
            _set_all(of_ranks, value)


def _stepped(setup: Setup) -> list[list[nn.Parameter]]:
    """Each optimizer's parameters."""
    return [
        [each for group in optimizer.param_groups for each in group["params"]]
        for optimizer in setup.optimizers
    ]


def _mean(values: Sequence[Tensor]) -> Tensor:
    """In rank order and divided once, sixteen bits in float32, as ranks do it."""
    dtype = values[0].dtype
    total = values[0].detach().to(SUMMED_IN.get(dtype, dtype), copy=True)
    for value in values[1:]:
        total += value
    return (total / len(values)).to(dtype)


def _set_all(targets: Sequence[Tensor], value: Tensor) -> None:
    for target in targets:
        target.copy_(value)

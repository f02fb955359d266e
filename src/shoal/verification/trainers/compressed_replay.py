"""One process that compresses gradients as the ranks do, and averages what would be sent.

It does what the guide page on compressed gradients says, with tensors instead of messages: it asks
the plan of an exchange which elements are encoded together, and shares no other code with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.compression import Codec, Form, Quantize, RandomK
from shoal.compression.low_rank import orthonormal
from shoal.strategies.gradients.compressed.exchange import CompressedExchange
from shoal.strategies.gradients.compressed.plan import Run
from shoal.verification.trainers.one_process import GradientSum, SplitBatch


class GroupReplay:
    """All ranks' exchange of one group's gradients, with what is left out and kept."""

    def __init__(self, exchange: CompressedExchange, num_ranks: int) -> None:
        """``exchange`` says what goes where; nothing is exchanged."""
        self._plan, self.slots = exchange.plan, exchange.group.layout.slots
        self._has_feedback = exchange.residual is not None
        self.zeros = torch.zeros(exchange.group.layout.num_elements, dtype=self._plan.dtype)
        """All elements of the group, as a gradient that is nowhere anything else."""
        self._residuals = [self.zeros.clone() for _ in range(num_ranks)]
        self._rights: dict[str, Tensor] = {}
        self._num_ranks, self._count = num_ranks, 0

    def average(self, gradients: Sequence[Tensor], collected: Sequence[Collection[int]]) -> Tensor:
        """What all ranks get; ``collected``: of which parameters each has a gradient."""
        self._count += 1
        for rank, whole in enumerate(gradients):
            for index in collected[rank]:
                slot = self.slots[index]
                whole[slot.start : slot.stop] += self._residuals[rank][slot.start : slot.stop]
                self._residuals[rank][slot.start : slot.stop] = 0
        result = self.zeros.clone()
        for run in self._plan.gathered:
            for rank, whole in enumerate(gradients):
                result[run.elements] += self._sent(run, rank, whole[run.elements], "")
            result[run.elements] /= self._num_ranks
        for owner, runs in enumerate(self._plan.scattered):
            for run in runs:
                result[run.elements] = self._scattered(run, owner, gradients)
        for slot in self._plan.unfactored:
            part = slice(slot.start, slot.stop)
            result[part] = _mean([whole[part] for whole in gradients], self._plan.factor_dtype)
        self._factored(gradients, result)
        return result

    def _sent(self, run: Run, rank: int, values: Tensor, who: str, times: int = 1) -> Tensor:
        """What arrives of some elements; the rank keeps the rest."""
        who = "" if run.codec.form is Form.SPARSE else who
        draw = zlib.crc32(f"{run.name}/{run.start}/{self._count}/{who}".encode())
        sent = run.codec.decode(run.codec.encode(values, draw=draw)).view(-1)
        self._keep(rank, run.elements, (values - sent) * times)
        return sent

    def _scattered(self, run: Run, owner: int, gradients: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(gradients[0][run.elements])
        for rank, whole in enumerate(gradients):
            values = whole[run.elements]
            total += values if rank == owner else self._sent(run, rank, values, str(rank))
        total /= self._num_ranks
        if self._plan.is_sharded:
            return total
        return self._sent(run, owner, total, f"{owner}, for all", times=self._num_ranks)

    def _factored(self, gradients: Sequence[Tensor], result: Tensor) -> None:
        for matrix in self._plan.matrices:
            name, codec, dtype = matrix.slot.name, matrix.codec, self._plan.factor_dtype
            own = [whole[matrix.elements].view(matrix.slot.shape) for whole in gradients]
            start = codec.start(matrix.slot.shape, own[0].device)
            right = codec.usable(self._rights[name], start) if name in self._rights else start
            left = _mean([codec.left(each, right).to(dtype) for each in own], dtype)
            base = orthonormal(left.float().view(-1, codec.rank))
            rights = [codec.right(each, base).to(dtype) for each in own]
            right = self._rights[name] = _mean(rights, dtype).float().view(-1, codec.rank)
            result[matrix.elements] = (base @ right.T).to(result.dtype).view(-1)
            for rank, whole in enumerate(gradients):
                error = whole[matrix.elements] - result[matrix.elements]
                self._keep(rank, matrix.elements, error)

    def _keep(self, rank: int, part: slice, error: Tensor) -> None:
        if self._has_feedback:
            self._residuals[rank][part] += error.nan_to_num(0.0, 0.0, 0.0)


class CompressedSum(GradientSum):
    """Gradients of several local batches, which are averaged as the ranks' payloads are."""

    def __init__(self, model: nn.Module, groups: Sequence[GroupReplay]) -> None:
        """``groups`` have what is kept from step to step."""
        super().__init__(model)
        self._groups = groups
        self._of_ranks: list[dict[str, Tensor]] = []

    def add(self) -> None:
        """Takes the gradients of one more."""
        named = self._model.named_parameters()
        self._of_ranks.append({name: p.grad for name, p in named if p.grad is not None})
        self._model.zero_grad()

    def finish(self, num_ranks: int) -> None:
        """Gives the model the average."""
        self._of_ranks += [{} for _ in range(num_ranks - len(self._of_ranks))]
        for group in self._groups:
            gradients, collected = zip(*(_flat(group, own) for own in self._of_ranks), strict=True)
            average = group.average(gradients, collected)
            for index in set().union(*collected):
                slot = group.slots[index]
                parameter = self._model.get_parameter(slot.name)
                values = average[slot.start : slot.stop].view(slot.shape)
                parameter.grad = values.to(parameter.dtype, copy=True)


def _flat(group: GroupReplay, gradients: Mapping[str, Tensor]) -> tuple[Tensor, set[int]]:
    """One rank's gradients as the group's memory, and of which parameters it has some."""
    whole, collected = group.zeros.clone(), set()
    for index, slot in enumerate(group.slots):
        if slot.name in gradients:
            whole[slot.start : slot.stop] = gradients[slot.name].reshape(-1)
            collected.add(index)
    return whole, collected


class CompressedReplay(SplitBatch):
    """One process that replays the ranks' local batches, and what their codec makes of them."""

    def __init__(
        self, exchanges: Sequence[CompressedExchange], warmup_steps: int, *args: Any, **how: Any
    ) -> None:
        """``exchanges`` are those of the model that is compared; the rest is `SplitBatch`'s."""
        super().__init__(*args, **how)
        draws = any(_draws(run.codec) for e in exchanges for runs in _all_runs(e) for run in runs)
        if draws and len(exchanges) > 1:
            raise ValueError(
                "shoal.verify replays codecs that draw random numbers only where all parameters "
                "travel in one group: say min_group_bytes=, more than the model has"
            )
        self._groups = [GroupReplay(each, len(self._streams)) for each in exchanges]
        self._warmup_steps, self._num_steps = warmup_steps, 0

    def _adding_up(self) -> GradientSum:
        self._num_steps += 1
        if self._num_steps <= self._warmup_steps:
            return super()._adding_up()
        return CompressedSum(self.setup.model, self._groups)


def _all_runs(exchange: CompressedExchange) -> list[Sequence[Run]]:
    return [exchange.plan.gathered, *exchange.plan.scattered]


def _draws(codec: Codec) -> bool:
    return isinstance(codec, RandomK) or (isinstance(codec, Quantize) and codec.stochastic)


def _mean(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """In rank order, and divided once."""
    total = tensors[0].to(dtype, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)

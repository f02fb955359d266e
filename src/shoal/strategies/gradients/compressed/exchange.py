"""The average of one group's gradients, exchanged as payloads.

[Note: two phases]
An exchange has operations that begin at once, and others that need what came of the first. These
have a lane of their own, and begin in the order in which the exchanges began: an order that is the
same on all ranks, whichever of them comes by first. No rank waits for a second phase in the middle
of a pass unless all ranks do so at the same point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm import Backend, ReduceOp, Work
from shoal.comm.accounting import Account
from shoal.comm.operation import AllGather, AllReduce, AllToAll, Operation, Payload
from shoal.comm.operation.base import Header
from shoal.compression.codec import CompressedTensor
from shoal.compression.low_rank import orthonormal
from shoal.sharding.layout import GroupLayout
from shoal.strategies.gradients.compressed.plan import ExchangePlan, Matrix, Run
from shoal.strategies.gradients.compressed.residual import Residual
from shoal.strategies.gradients.reductions import AverageToAll, Flagged, Flags
from shoal.strategies.settings import Compression


class _FlagsFirst(Flagged):
    """Flags before the numbers that the operation itself has in its header."""

    def carry(self, flags: Flags) -> None:
        self.meta, self.flags = (*flags.words, *self.meta), flags

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        super().check(self._own(headers), ranks)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        self.flags.unite(headers)
        return super(Flagged, self).prepare(self._own(headers), rank)  # type: ignore[safe-super]

    def _own(self, headers: Sequence[Header]) -> list[Header]:
        count = len(self.flags.words)
        return [header._replace(meta=header.meta[count:]) for header in headers]


class ScatterPayloads(_FlagsFirst, AllToAll):
    """Each owner gets what every rank has encoded for it."""


class GatherPayloads(_FlagsFirst, AllGather):
    """Everybody gets what every rank has encoded."""


class ExchangeQueue:
    """Exchanges of one model whose second phase has not begun; see [Note: two phases]."""

    def __init__(self, backend: Backend) -> None:
        """``backend``: a lane for second phases."""
        self.backend = backend
        self.num_steps = 0
        """How many steps were made with averaged gradients."""
        self.num_exchanges = 0
        self._waiting: deque[Exchange] = deque()

    def put(self, exchange: Exchange) -> None:
        """It has begun."""
        self._waiting.append(exchange)

    def advance(self) -> None:
        """Begins second phases as far as that needs no wait."""
        while self._waiting and self._waiting[0].is_first_done():
            self._waiting.popleft().begin_second()

    def begin_all(self) -> None:
        """Begins all second phases, so that they travel one after the other without a pause."""
        while self._waiting:
            self._waiting.popleft().begin_second()


class Exchanged(Protocol):
    """Memory that is averaged over the ranks: a group of parameters, or some of them."""

    index: int
    layout: GroupLayout  # with a slice for each rank
    low: int  # where this rank's slice begins
    high: int  # and where it ends
    master_dtype: torch.dtype

    @property
    def master(self) -> Tensor:
        """Something on its device."""


class CompressedExchange:
    """How the gradients of one group travel; it has what is kept from one exchange to the next."""

    def __init__(
        self,
        group: Exchanged,
        compression: Compression,
        backend: Backend,
        queue: ExchangeQueue,
        account: Account,
        *,
        is_sharded: bool,
        what: str = "gradient",
    ) -> None:
        """``backend``: the ranks to average over, for first phases; ``what`` is averaged."""
        self.group, self.backend, self.queue = group, backend, queue
        dtype = group.master_dtype
        self.plan = ExchangePlan(group.layout, compression.codec, dtype, is_sharded=is_sharded)
        self._compression = compression
        self.residual = Residual(group.layout, account) if compression.error_feedback else None
        self.right: dict[str, Tensor] = {}
        """The last right factor of each matrix, by the parameter's name."""
        feedback = ", error feedback" if compression.error_feedback else ""
        self.about = f"of {what} group {group.index} as {compression.codec!r}{feedback}"

    @property
    def is_active(self) -> bool:
        """Whether the first steps, which are uncompressed, are over."""
        return self.queue.num_steps >= self._compression.warmup_steps

    def count_uncompressed(self) -> None:
        """A reduction was made without compression."""
        raw = self.plan.raw_bytes(self.backend.rank)
        self.backend.count_compression(raw, raw)

    def start(
        self, whole: Tensor, flags: Flags, collected: set[int], out: Tensor | None
    ) -> Exchange:
        """Begins to average a buffer; ``out``: where this rank's elements of the average go."""
        rank = self.backend.rank
        self.backend.count_compression(self.plan.raw_bytes(rank), self.plan.sent_bytes(rank))
        self.queue.num_exchanges += 1
        exchange = Exchange(self, whole, out)
        exchange.begin_first(flags, collected)
        self.queue.put(exchange)
        return exchange


class Exchange(Work[Tensor]):
    """One exchange of one group's gradients; its result is the average, or this rank's part."""

    operation: Flagged
    """The first one, whose headers say who used what."""

    def __init__(self, kept: CompressedExchange, whole: Tensor, out: Tensor | None) -> None:
        self._kept, self._plan, self._whole, self._out = kept, kept.plan, whole, out
        self._rank, self._num_ranks = kept.backend.rank, kept.backend.size
        self._low, self._high = kept.group.low, kept.group.high
        self._number = kept.queue.num_exchanges
        self._first: dict[str, Work[Tensor]] = {}
        self._second: dict[str, Work[Tensor]] = {}
        self._left: dict[str, Tensor] = {}
        self._has_begun_second = self._is_over = False

    # The first phase ------------------------------------------------------------------------

    def begin_first(self, flags: Flags, collected: set[int]) -> None:
        """Encodes this rank's gradients and begins to send them."""
        if self._kept.residual is not None:
            self._kept.residual.add_to(self._whole, collected)
        operations: dict[str, Flagged] = {}
        if self._plan.has_scattered:
            operations["scattered"] = self._scatter()
        if self._plan.gathered:
            data = self._plan.gathered.encode(self._whole, self._number, "")
            self._keep_errors(self._plan.gathered.payloads(data))
            operations["gathered"] = GatherPayloads(data, None)
        if self._plan.matrices or self._plan.unfactored or not operations:
            operations["left"] = AverageToAll(self._left_factors(), ReduceOp.AVERAGE)
        for name, operation in operations.items():
            operation.carry(flags)
            operation.signature += f", {name} payloads {self._kept.about}"
            self._first[name] = self._kept.backend.start(operation)
        self.operation = next(iter(operations.values()))

    def _scatter(self) -> ScatterPayloads:
        sizes, parts = [], []
        for owner, runs in enumerate(self._plan.scattered):
            if owner == self._rank:
                sizes.append(0)
                continue
            data = runs.encode(self._whole, self._number, str(self._rank))
            self._keep_errors(runs.payloads(data))
            parts.append(data)
            sizes.append(data.numel())
        return ScatterPayloads(torch.cat(parts), None, sizes, (self._rank, self._num_ranks))

    def _keep_errors(self, payloads: Sequence[tuple[Run, CompressedTensor]]) -> None:
        if self._kept.residual is None:
            return
        for run, payload in payloads:
            sent = run.codec.decode(payload)
            self._kept.residual.keep(run.elements, torch.sub(self._whole[run.elements], sent))

    def _left_factors(self) -> Tensor:
        """The left factors of all matrices, and what is not factored, in a row."""
        parts = []
        for matrix in self._plan.matrices:
            parts.append(matrix.codec.left(self._matrix(matrix), self._last_right(matrix)))
        parts += [self._whole[slot.start : slot.stop] for slot in self._plan.unfactored]
        dtype = self._plan.factor_dtype
        if not parts:
            return self._whole.new_empty(0, dtype=dtype)
        return torch.cat([part.reshape(-1).to(dtype) for part in parts])

    def _matrix(self, matrix: Matrix) -> Tensor:
        return self._whole[matrix.elements].view(matrix.slot.shape)

    def _last_right(self, matrix: Matrix) -> Tensor:
        start = matrix.codec.start(matrix.slot.shape, self._whole.device)
        last = self._kept.right.get(matrix.slot.name)
        return start if last is None else matrix.codec.usable(last, start)

    # The second phase -----------------------------------------------------------------------

    def is_first_done(self) -> bool:
        """Whether the second phase could begin without a wait."""
        return all(work.is_done() for work in self._first.values())

    def begin_second(self) -> None:
        """Begins with what needs the results of the first phase."""
        results = {name: work.wait() for name, work in self._first.items()}
        self._has_begun_second = True
        operations: dict[str, Operation] = {}
        if self._plan.is_sharded:
            length = self._high - self._low
            self._out = self._whole.new_empty(length) if self._out is None else self._out
            self._out.zero_()
        if "scattered" in results:
            total = self._average_own(results["scattered"])
            if not self._plan.is_sharded:
                operations["scattered"] = AllGather(self._encode_average(total), None)
        if "gathered" in results:
            self._add_gathered(results["gathered"])
        if "left" in results and self._plan.matrices:
            operations["right"] = AllReduce(self._right_factors(results["left"]), ReduceOp.AVERAGE)
        if "left" in results:
            self._take_unfactored(results["left"])
        for name, operation in operations.items():
            operation.signature += f", {name} averages {self._kept.about}"
            self._second[name] = self._kept.queue.backend.start(operation)

    def _average_own(self, data: Tensor) -> Tensor:
        """The average of this rank's own elements, from what every rank has of them."""
        own = self._whole[self._low : self._high]
        runs = self._plan.scattered[self._rank]
        parts = deque(data.split(runs.num_bytes)) if runs else deque()
        total = self._out if self._plan.is_sharded and self._out is not None else None
        total = torch.zeros_like(own) if total is None else total
        for rank in range(self._num_ranks):  # in rank order, whoever adds them up
            if rank == self._rank:
                for run in runs:
                    here = slice(run.start - self._low, run.stop - self._low)
                    total[here] += own[here]
            elif runs:
                for run, payload in runs.payloads(parts.popleft()):
                    here = slice(run.start - self._low, run.stop - self._low)
                    run.codec.accumulate(payload, total[here])
        return total.div_(self._num_ranks)

    def _encode_average(self, total: Tensor) -> Tensor:
        runs = self._plan.scattered[self._rank]
        who = f"{self._rank}, for all"
        data = runs.encode(total, self._number, who, base=self._low)
        residual = self._kept.residual
        if residual is not None:
            for run, payload in runs.payloads(data):
                kept = total[run.start - self._low : run.stop - self._low]
                error = torch.sub(kept, run.codec.decode(payload)).mul_(self._num_ranks)
                residual.keep(run.elements, error)
        return data

    def _add_gathered(self, data: Tensor) -> None:
        """All ranks' sparse payloads, added up in rank order."""
        runs = self._plan.gathered
        for run in runs:
            self._whole[run.elements] = 0
        for part in data.split(runs.num_bytes):
            for run, payload in runs.payloads(part):
                run.codec.accumulate(payload, self._whole[run.elements])
        for run in runs:
            self._whole[run.elements] /= self._num_ranks

    def _right_factors(self, left: Tensor) -> Tensor:
        parts, start = [], 0
        for matrix in self._plan.matrices:
            factor = left[start : start + matrix.num_left].float()
            start += matrix.num_left
            base = orthonormal(factor.view(-1, matrix.codec.rank))
            self._left[matrix.slot.name] = base
            parts.append(matrix.codec.right(self._matrix(matrix), base).reshape(-1))
        return torch.cat(parts).to(self._plan.factor_dtype)

    def _take_unfactored(self, left: Tensor) -> None:
        start = sum(matrix.num_left for matrix in self._plan.matrices)
        for slot in self._plan.unfactored:
            stop = start + slot.stop - slot.start
            self._put(slot.start, slot.stop, left[start:stop])
            start = stop

    # The end ----------------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Whether `wait` would return at once; goes on with what can go on."""
        self._kept.queue.advance()
        return self._has_begun_second and all(work.is_done() for work in self._second.values())

    def wait(self, timeout: float | None = None) -> Tensor:
        """The average; each operation keeps the world's deadline."""
        if not self._is_over:
            self._kept.queue.begin_all()
            results = {name: work.wait() for name, work in self._second.items()}
            if "scattered" in results:
                self._decode_averages(results["scattered"])
            if "right" in results:
                self._multiply(results["right"])
            self._is_over = True
        result = self._out if self._plan.is_sharded else self._whole
        assert result is not None
        return result

    def _decode_averages(self, data: Tensor) -> None:
        start = 0
        for runs in self._plan.scattered:
            for run, payload in runs.payloads(data[start : start + runs.num_bytes]):
                run.codec.decode(payload, self._whole[run.elements])
            start += runs.num_bytes

    def _multiply(self, right: Tensor) -> None:
        start = 0
        for matrix in self._plan.matrices:
            factor = right[start : start + matrix.num_right].float().view(-1, matrix.codec.rank)
            start += matrix.num_right
            product = (self._left[matrix.slot.name] @ factor.T).to(self._whole.dtype).view(-1)
            if self._kept.residual is not None:
                error = torch.sub(self._whole[matrix.elements], product)
                self._kept.residual.keep(matrix.elements, error)
            self._kept.right[matrix.slot.name] = factor.clone()
            self._put(matrix.slot.start, matrix.slot.stop, product)

    def _put(self, start: int, stop: int, values: Tensor) -> None:
        """The average of some elements, or as much of it as is this rank's."""
        if not self._plan.is_sharded:
            self._whole[start:stop] = values
            return
        low, high = max(start, self._low), min(stop, self._high)
        if low < high:
            assert self._out is not None
            self._out[low - self._low : high - self._low] = values[low - start : high - start]

"""Which elements of a group's buffer are encoded with which codec, and where the payloads go.

[Note: ways of payloads]
Every way sends payloads only, and every rank computes the same from them:

- scattered: each rank encodes each owner's elements for it; the owner adds up what it decodes,
  takes the average, and, where all ranks need it, encodes the average anew for all of them;
- gathered: a sparse payload is short enough to go to everybody; all ranks add up all of them;
- factors: those of a matrix are averaged as they are, the left one and then the right one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from shoal.compression import Codec, Form, LowRank, Payload
from shoal.sharding.layout import GroupLayout, Slot


@dataclass(frozen=True)
class Run:
    """Elements of a group's buffer that become one payload."""

    name: str  # of the first parameter
    start: int
    stop: int
    codec: Codec

    @property
    def elements(self) -> slice:
        """Where they are in the buffer."""
        return slice(self.start, self.stop)


class Runs(list[Run]):
    """Runs whose payloads travel together, one behind the other."""

    dtype: torch.dtype

    @classmethod
    def of(cls, runs: Sequence[Run], dtype: torch.dtype) -> Runs:
        """Of a buffer of this dtype."""
        made = cls(runs)
        made.dtype = dtype
        return made

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each payload."""
        return [run.codec.payload_bytes((run.stop - run.start,), self.dtype) for run in self]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(self.sizes)

    def encode(self, buffer: Tensor, count: int, who: str, base: int = 0) -> Tensor:
        """The payloads of a buffer whose first element is element ``base`` of the group's.

        Ranks keep the same elements, where that is random, but round each in its own way: ``count``
        is the number of the exchange, ``who`` the rank.
        """
        parts = []
        for run, num_bytes in zip(self, self.sizes, strict=True):
            rank = "" if run.codec.form is Form.SPARSE else who
            draw = zlib.crc32(f"{run.name}/{run.start}/{count}/{rank}".encode())
            payload = run.codec.encode(buffer[run.start - base : run.stop - base], draw=draw)
            if payload.num_bytes != num_bytes:  # whoever gets it would take it for something else
                raise ValueError(
                    f"{run.codec!r} made {payload.num_bytes} bytes of {run.stop - run.start} "
                    f"elements, and its payload_bytes() had announced {num_bytes}: both must agree"
                )
            parts.append(payload)
        data = [payload.data for payload in parts]
        return torch.cat(data) if data else buffer.new_empty(0, dtype=torch.uint8)

    def payloads(self, data: Tensor) -> list[tuple[Run, Payload]]:
        """What bytes consist of."""
        parts = data.split(self.sizes) if self else []
        return [
            (run, Payload(part, torch.Size((run.stop - run.start,)), self.dtype))
            for run, part in zip(self, parts, strict=True)
        ]


@dataclass(frozen=True)
class Matrix:
    """A parameter whose gradient is factored."""

    slot: Slot
    codec: LowRank

    @property
    def elements(self) -> slice:
        """Where it is in the buffer."""
        return slice(self.slot.start, self.slot.stop)

    @cached_property
    def num_left(self) -> int:
        """Elements of the left factor."""
        return self.slot.shape[0] * self.codec.rank

    @cached_property
    def num_right(self) -> int:
        """Elements of the right factor."""
        return self.slot.shape.numel() // self.slot.shape[0] * self.codec.rank


class ExchangePlan:
    """What becomes of a group's gradients; see [Note: ways of payloads].

    Attributes:
        scattered: For each owner what it gets.
        gathered: What everybody gets.
        matrices: What is factored.
        unfactored: Parameters that are averaged as they are, beside the factors.
    """

    def __init__(
        self, layout: GroupLayout, codec: Codec, dtype: torch.dtype, *, is_sharded: bool
    ) -> None:
        """``is_sharded``: whether a rank needs its own elements of the average only."""
        self.layout, self.dtype, self.is_sharded = layout, dtype, is_sharded
        self.matrices: list[Matrix] = []
        self.unfactored: list[Slot] = []
        gathered: list[Run] = []
        scattered: list[Run] = []
        for slot in layout.slots:
            chosen = codec.for_tensor(slot.name, slot.shape)
            if isinstance(chosen, LowRank):
                if chosen.factors(slot.shape):
                    self.matrices.append(Matrix(slot, chosen))
                else:
                    self.unfactored.append(slot)
            elif slot.start < slot.stop:
                is_gathered = chosen.form is Form.SPARSE and not is_sharded
                runs = gathered if is_gathered else scattered
                runs.append(Run(slot.name, slot.start, slot.stop, chosen))
        self.gathered = Runs.of(gathered, dtype)
        self.scattered = [Runs.of(runs, dtype) for runs in _cut(scattered, layout.bounds)]
        self.has_scattered = bool(scattered)

    @property
    def factor_dtype(self) -> torch.dtype:
        """What factors, and what is averaged beside them, travel in."""
        return torch.promote_types(self.dtype, torch.float32)

    def raw_bytes(self, rank: int) -> int:
        """What this rank would send of uncompressed gradients."""
        bounds, num_ranks = self.layout.bounds, len(self.layout.bounds) - 1
        if self.is_sharded:
            others = bounds[-1] - (bounds[rank + 1] - bounds[rank])
        else:
            others = 2 * (num_ranks - 1) * bounds[-1] // num_ranks
        return others * self.dtype.itemsize

    def sent_bytes(self, rank: int) -> int:
        """What this rank sends."""
        num_ranks = len(self.scattered)
        others = num_ranks - 1
        sent = others * self.gathered.num_bytes
        sent += sum(runs.num_bytes for each, runs in enumerate(self.scattered) if each != rank)
        if not self.is_sharded:
            sent += others * self.scattered[rank].num_bytes
        averaged = sum(slot.shape.numel() for slot in self.unfactored)
        averaged += sum(matrix.num_left + matrix.num_right for matrix in self.matrices)
        return sent + 2 * others * averaged * self.factor_dtype.itemsize // num_ranks


def _cut(runs: Sequence[Run], bounds: Sequence[int]) -> list[list[Run]]:
    """Each owner's part, in which neighbours are one where their codec allows it."""
    owned: list[list[Run]] = [[] for _ in bounds[1:]]
    for owner, (low, high) in enumerate(pairwise(bounds)):
        mine = owned[owner]
        for run in runs:
            start, stop = max(run.start, low), min(run.stop, high)
            if start >= stop:
                continue
            last = mine[-1] if mine else None
            joins = last is not None and last.stop == start and last.codec == run.codec
            if last is not None and joins and run.codec.joins_tensors:
                mine[-1] = Run(last.name, last.start, stop, run.codec)
            else:
                mine.append(Run(run.name, start, stop, run.codec))
    return owned

"""Kept parts as a source that state is loaded from: each rank reads what it needs from holders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.disk.filesystem import DISK
from shoal.checkpoint.format.manifest import SliceRecord, TensorRecord
from shoal.checkpoint.load.tensor_source import MemorySource, Wanted
from shoal.checkpoint.save.rank_state import merge_values
from shoal.comm import Backend
from shoal.comm.peer_tensors.lending import Answer, Lent, PeerTensors
from shoal.elastic.kept_part import Entry, KeptPart
from shoal.errors import ShoalError
from shoal.sharding.extent import overlap
from shoal.sharding.split import Split
from shoal.system.deadline import Deadline
from shoal.torch_support.dtypes import dtype_called

_WHERE = Path("the ranks' memory")


class LentParts:
    """What a rank lends of the parts it keeps, by the rank whose part it is."""

    def __init__(self, parts: Mapping[int, KeptPart]) -> None:
        """Nothing is copied before it is asked for."""
        self._parts = parts

    def handle(self, request: dict[str, Any], values: Tensor | None) -> Answer:
        """Some ranges of bytes of one part, joined."""
        data = self._parts[int(request["part"])].data
        ranges = request["ranges"]
        return Answer({}, torch.cat([data[begin:end] for begin, end in ranges]))

    def find(self, key: str) -> Lent | None:
        """Nothing is lent by key."""
        return None

    def listing(self) -> list[list[Any]]:
        """Whose parts there are."""
        return [[str(rank), part.data.numel()] for rank, part in self._parts.items()]


@dataclass
class KeptSource(MemorySource):
    """The parts of one step, wherever they are.

    Attributes:
        holders: By the rank whose part it is: who has it now.
        peers: How the others' are read.
        own: What this rank has itself.
    """

    holders: Mapping[int, int] = field(default_factory=dict)
    peers: PeerTensors | None = None
    own: Mapping[int, KeptPart] = field(default_factory=dict)
    timeout: float = 0.0

    @classmethod
    def open(
        cls,
        abouts: Mapping[int, list[Any]],
        holders: Mapping[int, int],
        own: Mapping[int, KeptPart],
        backend: Backend,
    ) -> KeptSource:
        """All ranks call it; ``abouts`` says what each rank's part consists of."""
        found = {rank: KeptPart.of(about, torch.empty(0)) for rank, about in abouts.items()}
        values = merge_values([found[rank].values for rank in sorted(found)])
        source = cls(DISK, _WHERE, _records(found), (), values, is_checked=False)
        source.holders, source.own, source.timeout = holders, own, backend.timeout
        source.peers = backend.lend(LentParts(own))
        return source

    def close(self) -> None:
        """Nothing is lent any more."""
        if self.peers is not None:
            self.peers.close()

    def read(self, wanted: Sequence[Wanted]) -> int:
        """Fills the memory of all that is wanted, with one call for each part."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        targets: dict[int, list[Tensor]] = {}
        for each in wanted:
            record, found = self.tensors[each.tensor], 0
            memory = each.memory.view(torch.uint8)
            size = record.dtype.itemsize
            for piece in record.slices:
                runs = overlap(piece.extent, each.extent)
                found += runs.num_elements
                for left, right, length in zip(*runs, strict=True):
                    begin = int(piece.key) + int(left) * size
                    num_bytes = int(length) * size
                    ranges.setdefault(piece.file, []).append((begin, begin + num_bytes))
                    target = memory[int(right) * size : int(right) * size + num_bytes]
                    targets.setdefault(piece.file, []).append(target)
            if found != each.extent.num_elements:
                raise ShoalError(f"no rank has some elements of {each.tensor}")
        for part, wanted_ranges in ranges.items():
            self._fetch(part, wanted_ranges, targets[part])
        return sum(each.memory.nbytes for each in wanted)

    def _fetch(self, part: int, ranges: list[tuple[int, int]], targets: list[Tensor]) -> None:
        if part in self.own:
            data = self.own[part].data
            for (begin, end), target in zip(ranges, targets, strict=True):
                target.copy_(data[begin:end])
            return
        assert self.peers is not None
        request = {"kind": "read", "part": part, "ranges": [list(each) for each in ranges]}
        answer = self.peers.call(self.holders[part], request, None, Deadline(self.timeout))
        assert answer.values is not None
        lengths = [end - begin for begin, end in ranges]
        for target, found in zip(targets, answer.values.split(lengths), strict=True):
            target.copy_(found)


def _records(parts: Mapping[int, KeptPart]) -> dict[str, TensorRecord]:
    """Each tensor, and which part has which elements; of several the first rank's count."""
    found: dict[str, list[tuple[int, Entry]]] = {}
    for rank in sorted(parts):
        for entry in parts[rank].entries:
            found.setdefault(entry.key, []).append((rank, entry))
    return {key: _record(entries) for key, entries in found.items()}


def _record(entries: list[tuple[int, Entry]]) -> TensorRecord:
    first_rank, first = entries[0]
    if not first.is_same_everywhere:
        entries = [(rank, entry) for rank, entry in entries if rank == first_rank]
    by_split: dict[Split | None, list[tuple[int, Entry]]] = {}
    for rank, entry in entries:
        by_split.setdefault(entry.extent.split, []).append((rank, entry))
    slices = [each for part in by_split.values() for each in _slices(part)]
    return TensorRecord(dtype_called(first.dtype), torch.Size(first.shape), tuple(slices))


def _slices(entries: list[tuple[int, Entry]]) -> Iterator[SliceRecord]:
    """Of one part of a tensor, each element once."""
    reached = 0
    for rank, entry in sorted(entries, key=lambda each: (each[1].start, each[0])):
        start = max(entry.start, reached)  # what another has already is left out
        if start < entry.stop:
            offset = entry.offset + (start - entry.start) * dtype_called(entry.dtype).itemsize
            yield SliceRecord(entry.extent.narrowed(start, entry.stop), rank, str(offset), ())
            reached = entry.stop

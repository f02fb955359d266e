"""One save as one rank sees it: look, write, commit; each step succeeds on all ranks or on none."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.disk.checkpoint_folder import CheckpointFolder
from shoal.checkpoint.disk.filesystem import opened
from shoal.checkpoint.format.manifest import Content, encode, joined
from shoal.checkpoint.save.assignment import Claim
from shoal.checkpoint.save.copy_buffer import CopyBuffer
from shoal.checkpoint.save.division import digests, divide
from shoal.checkpoint.save.pending import PendingSave
from shoal.checkpoint.save.rank_state import RankState, merge_values
from shoal.checkpoint.save.writing import Outgoing, shares, write_file
from shoal.checkpoint.together import together
from shoal.comm import Backend
from shoal.errors import CheckpointError
from shoal.system.libc import own_cores
from shoal.torch_support.concurrency import run_concurrently
from shoal.torch_support.copying import copy

# sha256 keeps a core busy, at a rate below that of a good disk. So a rank that has several cores
# writes as many files at once, if each gets so many bytes.
_MOST_FILES = 8
_LEAST_BYTES = 1 << 26
# More do not copy faster: memory has its own limit.
_MOST_COPIERS = 4

Receipt = dict[str, Any]
"""What a rank has written and knows, as plain data that can be sent or be a file."""


@dataclass
class RunningSave:
    """One save.

    Attributes:
        folder: Where to.
        ranks: Who takes part; None for a process of its own.
        step: The step it is of.
        keep: How many checkpoints to keep.
        written_by: See `Manifest`.
        name: Of the checkpoint.
        values: What this rank knows that is no tensor.
        keys: All tensors of the checkpoint.
        outgoing: What this rank writes.
        num_cores: How many this rank can have to itself while nothing else goes on.
    """

    folder: CheckpointFolder
    ranks: Backend | None
    step: int | None
    keep: int | None
    written_by: Mapping[str, Any]
    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Sequence[str] = ()
    outgoing: Sequence[Outgoing] = ()
    num_cores: int = 1
    _unlock: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def size(self) -> int:
        """How many take part."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def doing(self) -> str:
        """For messages."""
        return f"saving to {self.folder.root}"

    def prepare(self, collect: Callable[[], RankState]) -> None:
        """Finds out what each rank holds and writes; the first rank makes the folder."""
        mine: list[RankState] = []
        claims: dict[str, Claim] = {}

        def action() -> tuple[str, tuple[str, str], tuple[str, frozenset[int]]]:
            mine.append(collect())
            claims.update({key: held.claim() for key, held in mine[0].tensors.items()})
            if self.rank == 0:
                self._begin()
            return self.name, digests(self.ranks, claims), (platform.node(), own_cores())

        with self.discarding():
            answers = together(self.ranks, action, self.doing)
            self.name = answers[0][0]
            shown = [own for _, own, _ in answers]
            self.num_cores = _fair_share([cores for _, _, cores in answers])
            division = divide(self.ranks, claims, shown, self.doing)
            self.keys = division.keys
            self.outgoing = mine[0].outgoing(division.assigned[self.rank])
            self.values = mine[0].values

    def _begin(self) -> None:
        try:
            self._unlock = self.folder.lock()
            self.name = self.folder.begin(self.step)
        except OSError as error:
            raise CheckpointError(f"cannot save to {self.folder.root}: {error}") from error

    def complete(self) -> PendingSave:
        """Writes and commits, with all ranks at once."""
        with self.discarding():
            num_files = min(self.num_cores, _MOST_FILES)
            receipts = together(self.ranks, lambda: self.write(num_files), self.doing)
            together(self.ranks, lambda: self.commit(receipts), self.doing)
        self.unlock()
        return PendingSave(self.path)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """If anything goes wrong inside, what there is of the checkpoint is removed."""
        try:
            yield
        except BaseException:
            if self.rank == 0 and self.name:
                self.folder.discard(self.name)
            self.unlock()
            raise

    def unlock(self) -> None:
        """Lets others save to the folder; twice is fine."""
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self.folder.root / self.name

    def copy(self, old: CopyBuffer | None = None) -> CopyBuffer:
        """Copies what this rank writes, so that training can go on changing it.

        Args:
            old: What an earlier save has copied into.
        """
        pieces = [(each.dtype, each.extent.num_elements) for each in self.outgoing]
        buffer = CopyBuffer(pieces, old)
        copies = [
            replace(each, parts=_fixed([buffer.take(*piece)]))
            for each, piece in zip(self.outgoing, pieces, strict=True)
        ]
        count = max(1, min(self.num_cores, _MOST_COPIERS, buffer.num_bytes // _LEAST_BYTES))
        pairs = zip(shares(copies, count), shares(self.outgoing, count), strict=True)
        run_concurrently([partial(_copy, *pair) for pair in pairs])
        self.outgoing = copies
        return buffer

    def write(self, most_files: int = 1) -> Receipt:
        """Writes this rank's part to some files, side by side; no communication."""
        num_bytes = sum(each.num_bytes for each in self.outgoing)
        num_files = max(1, min(most_files, num_bytes // _LEAST_BYTES))
        files = run_concurrently(
            [
                partial(self._write_file, _file_name(self.rank, number), own)
                for number, own in enumerate(shares(self.outgoing, num_files))
            ]
        )
        keys = dict.fromkeys(each.tensor for each in self.outgoing)
        return {**joined(files, keys), "values": self.values}

    def _write_file(
        self, name: str, outgoing: Sequence[Outgoing], is_unwanted: threading.Event
    ) -> Content:
        draft = self.folder.draft(self.name)
        try:
            return write_file(
                self.folder.disk,
                draft,
                name,
                outgoing,
                metadata={"format": "pt"},
                is_unwanted=is_unwanted,
            )
        except FileNotFoundError as error:
            raise CheckpointError(
                f"rank 0 has made {draft}, but rank {self.rank} does not find it: the folder of "
                "checkpoints must be on a file system that all ranks share"
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot write {draft / name}: {error}") from error

    def num_bytes_of(self, rank: int) -> int | None:
        """How much a rank has written by now."""
        try:
            with opened(self.folder.disk, self.folder.draft(self.name) / _file_name(rank)) as file:
                return file.num_bytes
        except OSError:
            return None

    def commit(self, receipts: Sequence[Receipt]) -> None:
        """On the first rank, once all files are safe: makes the checkpoint one that is found."""
        if self.rank != 0:
            return
        values = {"step": self.step, **merge_values([each["values"] for each in receipts])}
        content = joined(receipts, self.keys)
        try:
            self.folder.commit(self.name, encode(content, values, self.written_by))
        except OSError as error:
            raise CheckpointError(f"cannot finish {self.path}: {error}") from error
        if self.keep is not None:
            self.folder.prune(self.keep)


def _fair_share(by_rank: Sequence[tuple[str, frozenset[int]]]) -> int:
    """How many cores this process can have to itself, from the hosts and cores of all ranks."""
    cores = own_cores()
    rivals = [host for host, others in by_rank if host == platform.node() and others & cores]
    return max(1, len(cores) // max(1, len(rivals)))


def _file_name(rank: int, number: int = 0) -> str:
    return f"data-{rank:05d}{f'-{number}' if number else ''}.safetensors"


@torch.no_grad()
def _copy(targets: Sequence[Outgoing], sources: Sequence[Outgoing], _: threading.Event) -> None:
    # A GPU's memory is copied to the host at once; waiting for that is all that training does.
    for target, source in zip(targets, sources, strict=True):
        (copied,) = target.parts()
        offset = 0
        for part in source.parts():
            copy(copied[offset : offset + part.numel()], part)
            offset += part.numel()


def _fixed(parts: list[Tensor]) -> Callable[[], Any]:
    return lambda: iter(parts)

"""One save as one rank sees it: look, write, commit; each step succeeds on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import merging
from shoal.checkpoint.agreement import together
from shoal.checkpoint.arena import Arena
from shoal.checkpoint.assignment import Claim, Claims
from shoal.checkpoint.division import digests, divide
from shoal.checkpoint.filesystem import opened
from shoal.checkpoint.merging import Receipt
from shoal.checkpoint.pending import PendingSave
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.store import Store
from shoal.checkpoint.writing import Outgoing, write_file
from shoal.comm import Backend
from shoal.comm.copying import copy
from shoal.errors import CheckpointError


@dataclass
class Plan:
    """One save.

    Attributes:
        store: Where to.
        ranks: Who takes part; None for a process of its own.
        step: The step it is of.
        keep: How many checkpoints to keep.
        written_by: See `Manifest`.
        name: Of the checkpoint.
        values: What this rank knows that is no tensor.
        claims: What each rank holds.
        outgoing: What this rank writes.
    """

    store: Store
    ranks: Backend | None
    step: int | None
    keep: int | None
    written_by: Mapping[str, Any]
    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    claims: Sequence[Claims] = ()
    outgoing: Sequence[Outgoing] = ()
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
        return f"saving to {self.store.root}"

    def look(self, take: Callable[[], Snapshot]) -> None:
        """Finds out what everybody holds and who writes what; the first rank makes the folder."""
        mine: list[Snapshot] = []
        claims: dict[str, Claim] = {}

        def action() -> tuple[str, tuple[str, str]]:
            mine.append(take())
            claims.update({key: held.claim() for key, held in mine[0].tensors.items()})
            if self.rank == 0:
                self._unlock = self.store.lock()
                self.name = self.store.begin(self.step)
            return self.name, digests(self.ranks, claims)

        with self.discarding():
            answers = together(self.ranks, action, self.doing)
            self.name = answers[0][0]
            shown = [own for _, own in answers]
            division = divide(self.ranks, claims, shown, self.doing)
            self.claims = division.claims
            self.outgoing = mine[0].outgoing(division.work[self.rank])
            self.values = mine[0].values

    def complete(self) -> PendingSave:
        """Writes and commits, with all ranks at once."""
        with self.discarding():
            receipts = together(self.ranks, self.write, self.doing)
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
                self.store.discard(self.name)
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
        return self.store.root / self.name

    def copy(self, old: Arena | None = None) -> Arena:
        """Copies what this rank writes, so that training can go on changing it.

        Args:
            old: What an earlier save has copied into.
        """
        pieces = ((each.dtype, each.extent.num_elements) for each in self.outgoing)
        arena = Arena(pieces, old)
        self.outgoing = [
            replace(each, parts=_fixed([_copied(each, arena)])) for each in self.outgoing
        ]
        return arena

    def write(self) -> Receipt:
        """Writes this rank's file; no communication."""
        draft, name = self.store.draft(self.name), _file_name(self.rank)
        try:
            written = write_file(
                self.store.disk, draft, name, self.outgoing, metadata={"format": "pt"}
            )
        except FileNotFoundError as error:
            raise CheckpointError(
                f"rank 0 has made {draft}, but rank {self.rank} does not find it: the folder of "
                "checkpoints must be on a file system that all ranks share"
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot write {draft / name}: {error}") from error
        return merging.receipt(written, self.values)

    def num_bytes_of(self, rank: int) -> int | None:
        """How much a rank has written by now."""
        try:
            with opened(self.store.disk, self.store.draft(self.name) / _file_name(rank)) as file:
                return file.num_bytes
        except OSError:
            return None

    def commit(self, receipts: Sequence[Receipt]) -> None:
        """On the first rank, once all files are safe: makes the checkpoint one that is found."""
        if self.rank != 0:
            return
        manifest = merging.merge(receipts, self.claims, self.step, self.written_by)
        try:
            self.store.commit(self.name, manifest.encode())
        except OSError as error:
            raise CheckpointError(f"cannot finish {self.path}: {error}") from error
        if self.keep is not None:
            self.store.prune(self.keep)


def _file_name(rank: int) -> str:
    return f"data-{rank:05d}.safetensors"


@torch.no_grad()
def _copied(outgoing: Outgoing, arena: Arena) -> Tensor:
    # A GPU's memory is copied to the host at once; waiting for that is all that training does.
    copied = arena.take(outgoing.dtype, outgoing.extent.num_elements)
    place = 0
    for part in outgoing.parts():
        copy(copied[place : place + part.numel()], part)
        place += part.numel()
    return copied


def _fixed(parts: list[Tensor]) -> Callable[[], Any]:
    return lambda: iter(parts)

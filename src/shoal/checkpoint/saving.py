"""`save`: every rank writes its part, rank 0 makes it valid, and all learn whether it is.

`RunningSave` has the steps: look, write, commit; each succeeds on all ranks or on none.
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import training_state
from shoal.checkpoint.disk.checkpoint_folder import MOST_STEP, CheckpointFolder
from shoal.checkpoint.disk.filesystem import DISK, FileSystem, opened
from shoal.checkpoint.format.manifest import Content, encode, joined
from shoal.checkpoint.save import background, rank_state
from shoal.checkpoint.save.division import Claim, digests, divide
from shoal.checkpoint.save.rank_state import RankState, merge_values
from shoal.checkpoint.save.writing import Outgoing, shares, write_file
from shoal.checkpoint.together import PendingSave, check_same, finish_pending, together
from shoal.checkpoint.training_state import Companions
from shoal.comm import Backend
from shoal.errors import CheckpointError
from shoal.optim import ShardedOptimizer
from shoal.strategies import ShardedModel
from shoal.system.libc import own_cores
from shoal.torch_support.concurrency import run_concurrently

# sha256 keeps a core busy, at a rate below that of a good disk. So a rank that has several cores
# writes as many files at once, if each gets so many bytes.
_MOST_FILES = 8
_LEAST_BYTES = 1 << 26

Receipt = dict[str, Any]
"""What a rank has written and knows, as plain data that can be sent or be a file."""


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    keep: int | None = None,
    wait: bool = True,
    filesystem: FileSystem = DISK,
) -> PendingSave:
    """Adds a checkpoint to the folder ``path``; every rank calls it.

    Each rank writes what it holds, each element once; no rank needs the full model. Killed at any
    moment, the folder has the checkpoints of before, or these and the new one.

    Args:
        path: A folder of checkpoints, on a file system that all ranks share.
        model: Wrapped by any strategy, or a plain module.
        optimizer: Its optimizer, or a list of them.
        step: A number to find the checkpoint by.
        extra: Whatever else: numbers, texts, lists, dicts and tensors. Rank 0's counts.
        scheduler: A learning-rate scheduler, or a list; anything with a ``state_dict()``, or such a
            state.
        scaler: A gradient scaler.
        sampler: A `shoal.sampler`, or a loader that `as_distributed` divided.
        keep: How many checkpoints stay in the folder; all by default.
        wait: If false, what there is to save is copied, and written while training goes on. An
            error is then raised by the next call of `save` or `load`, or by ``wait()`` of what
            comes back.
        filesystem: Where the folder is.

    Returns:
        The save; ``.path`` is where it is, ``.wait()`` returns once it is safe on disk.

    Raises:
        CheckpointError: On every rank, if any rank could not write its part.

    Example:
        >>> shoal.save("run", model, optimizer, step=step, sampler=sampler, keep=3)
        >>> extra = shoal.load("run", model, optimizer, sampler=sampler)
    """
    step, keep = _checked(step, keep)
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict; got a {type(extra).__name__}")
    ranks = training_state.ranks_of(model)
    finish_pending(ranks)
    if isinstance(model, ShardedModel):
        model.check_ranks("shoal.save()")
        model.synchronize_buffers()
    folder = CheckpointFolder(filesystem.absolute(Path(path)), filesystem)
    companions = Companions(scheduler, scaler, sampler)
    optimizers = training_state.as_list(optimizer)
    # The folder above may be called something else on another host.
    same = {"step": step, "keep": keep, "wait": bool(wait), "the folder": folder.root.name}
    running = RunningSave(folder, ranks, step, keep, _written_by(model, ranks), same)
    running.prepare(
        lambda: rank_state.collect(model, optimizers, companions, extra or {}, running.rank)
    )
    if not wait:
        return background.start(running)
    saved = running.complete()
    for each in optimizers:
        if isinstance(each, ShardedOptimizer):
            each.note_checkpoint(saved.path, dict(companions.items()))
    return saved


def _checked(step: Any, keep: Any) -> tuple[int | None, int | None]:
    """Both as plain integers: the step is part of a name that loaders must find again."""
    step = None if step is None else _integer("step", step)
    keep = None if keep is None else _integer("keep", keep)
    if step is not None and not 0 <= step <= MOST_STEP:
        raise ValueError(f"step must be a number from 0 to {MOST_STEP}; got {step}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1; got {keep}")
    return step, keep


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r}") from None


def _written_by(model: nn.Module, ranks: Backend | None) -> dict[str, Any]:
    """For information only: no loader looks at it."""
    is_wrapped = isinstance(model, ShardedModel)
    options: Any = model.options if is_wrapped else {}
    return {
        "shoal": _version(),
        "torch": torch.__version__,
        "host": platform.node(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": type(training_state.plain_module(model)).__name__,
        "strategy": model.strategy if is_wrapped else "plain",
        "ranks": 1 if ranks is None else ranks.size,
        "options": {key: str(value) for key, value in options.items()},
    }


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("shoal")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass
class RunningSave:
    """One save.

    Attributes:
        ranks: Who takes part; None for a process of its own.
        arguments: Of the call, as far as all ranks must give the same.
        keep: How many checkpoints to keep.
        written_by: See `Manifest`.
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
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Sequence[str] = ()
    outgoing: Sequence[Outgoing] = ()
    num_cores: int = 1
    _unlock: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
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

        def action() -> tuple[str, tuple[str, str], tuple[str, frozenset[int]], Mapping[str, Any]]:
            mine.append(collect())
            claims.update({key: held.claim() for key, held in mine[0].tensors.items()})
            if self.rank == 0:
                self._begin()
            host = (platform.node(), own_cores())
            return self.name, digests(self.ranks, claims), host, self.arguments

        with self.discarding():
            answers = together(self.ranks, action, self.doing)
            self.name = answers[0][0]
            check_same("shoal.save()", [arguments for *_, arguments in answers])
            shown = [own for _, own, _, _ in answers]
            self.num_cores = _fair_share([cores for _, _, cores, _ in answers])
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
            num_files = self.num_threads(_MOST_FILES)
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

    def num_threads(self, most: int) -> int:
        """With how many threads it pays to write, or to copy, this rank's part."""
        num_bytes = sum(each.num_bytes for each in self.outgoing)
        return max(1, min(most, self.num_cores, num_bytes // _LEAST_BYTES))

    def write(self, num_files: int = 1) -> Receipt:
        """Writes this rank's part to some files, side by side; no communication."""
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
            return write_file(self.folder.disk, draft, name, outgoing, is_unwanted)
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
            raise CheckpointError(
                f"cannot finish {self.path}: {error}{self._left_in_place()}"
            ) from error
        if self.keep is not None:
            self.folder.prune(self.keep)

    def _left_in_place(self) -> str:
        """What an error at the very end leaves: a checkpoint that is whole, or nothing new."""
        if self.name not in self.folder.names():
            return ""
        if self.folder.latest() == self.name:
            return (
                ". The new checkpoint is in place all the same, and is what load() takes. Only a "
                "power failure could still undo it: save again to be sure"
            )
        return (
            f". The new checkpoint is in place all the same; LATEST names another, so load() takes "
            f"that. Give load() {str(self.path)!r} to have the new one, or save again"
        )


def _fair_share(by_rank: Sequence[tuple[str, frozenset[int]]]) -> int:
    """How many cores this process can have to itself, from the hosts and cores of all ranks."""
    cores = own_cores()
    rivals = [host for host, others in by_rank if host == platform.node() and others & cores]
    return max(1, len(cores) // max(1, len(rivals)))


def _file_name(rank: int, number: int = 0) -> str:
    return f"data-{rank:05d}{f'-{number}' if number else ''}.safetensors"

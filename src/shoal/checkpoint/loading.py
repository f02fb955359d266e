"""`load`: every rank reads its part of whatever others have written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint import training_state
from shoal.checkpoint.disk.checkpoint_folder import LATEST, MANIFEST, CheckpointFolder
from shoal.checkpoint.disk.filesystem import DISK, FileSystem
from shoal.checkpoint.load.matching import Misfits
from shoal.checkpoint.load.tensor_source import (
    MemorySource,
    StateDictSource,
    TensorSource,
    open_checkpoint,
    open_path,
)
from shoal.checkpoint.load.transaction import LoadTransaction, Target
from shoal.checkpoint.together import finish_pending, together
from shoal.checkpoint.training_state import Companions
from shoal.comm import Backend
from shoal.errors import CheckpointWarning, CorruptCheckpointError
from shoal.optim import ShardedOptimizer


class Loaded(dict[str, Any]):
    """The extras of a checkpoint, and where they came from.

    Attributes:
        step: What was given to `save`.
        path: The checkpoint that was loaded.
        missing: Names of the model that are not in the checkpoint; only with ``strict=False``.
        unexpected: Names in the checkpoint that the model does not have; likewise.
        misshapen: Names that have another shape in the checkpoint; likewise.

    Example:
        >>> extra = shoal.load("run", model, optimizer)
        >>> extra["best"], extra.step
        (0.93, 2000)
    """

    def __init__(
        self,
        extra: Mapping[str, Any],
        step: int | None,
        path: Path | None,
        misfits: Misfits | None = None,
    ) -> None:
        super().__init__(extra)
        self.step, self.path = step, path
        misfits = misfits or Misfits()
        self.missing, self.unexpected = misfits.missing, misfits.unexpected
        self.misshapen = list(misfits.misshapen)


def load(
    path: str | Path | Mapping[str, Tensor],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    strict: bool = True,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    random_state: bool | None = None,
    fallback: bool = True,
    filesystem: FileSystem = DISK,
) -> Loaded:
    """Loads a checkpoint into a model and its optimizer; every rank calls it.

    Whatever strategy and number of ranks wrote it: each rank reads its own part. If anything is
    wrong, an error is raised on every rank and nothing has changed.

    Args:
        path: A folder of checkpoints, of which the latest is taken, or one of the checkpoints; a
            ``model.safetensors`` or a folder with one, as Hugging Face writes it, also in several
            files with an index; or a plain state_dict.
        model: Wrapped by any strategy, or a plain module.
        optimizer: Its optimizer, or a list of them.
        strict: Whether everything must fit; if false, what fits is loaded, and what comes back
            tells what did not.
        scheduler: What was saved as such; so are the next two.
        scaler: A gradient scaler.
        sampler: A `shoal.sampler`.
        random_state: Whether random generators go on where they were; by default if an optimizer
            is loaded.
        fallback: Whether the newest undamaged checkpoint of a folder is taken, with a warning, if
            the latest is damaged.
        filesystem: Where the files are.

    Returns:
        The extras that were saved, a dict with ``.step`` and ``.path`` besides.

    Raises:
        CorruptCheckpointError: If a file is damaged, missing or foreign; it names file and tensor.
        CheckpointMismatchError: If the checkpoint does not fit; it lists the names.

    Example:
        >>> model, optimizer = shoal.as_distributed(model, optimizer, strategy="zero3")
        >>> extra = shoal.load("run", model, optimizer)
    """
    ranks = training_state.ranks_of(model)
    finish_pending(ranks)
    optimizers = training_state.as_list(optimizer)
    target = Target(
        model,
        optimizers,
        Companions(scheduler, scaler, sampler),
        strict,
        bool(optimizers) if random_state is None else random_state,
        0 if ranks is None else ranks.rank,
    )
    if isinstance(path, Mapping):
        return _load_from(lambda: StateDictSource.of(path), target, ranks)
    location = filesystem.followed(Path(path))
    if not filesystem.is_folder(location):  # the name of a file tells what it is
        location = filesystem.absolute(Path(path))
    found = together(ranks, lambda: _candidates(filesystem, location, target.rank), "looking")[0]
    return _load_first_good(filesystem, location, found, target, ranks, fallback=fallback)


def _candidates(disk: FileSystem, path: Path, rank: int) -> list[str]:
    """Names inside of a folder of checkpoints, the best first; "" for the path itself.

    The first rank looks, since the others might see something newer.
    """
    if rank != 0:
        return []
    if disk.is_file(path / MANIFEST):
        return [""]
    folder = CheckpointFolder(path, disk)
    names = folder.candidates()
    if not names:
        return [""]
    latest = folder.latest()
    if latest is not None and latest != names[0]:
        _warn(f"{path / LATEST} names {latest}, which is not there; the newest is {names[0]}")
    return names


def _load_first_good(
    disk: FileSystem,
    path: Path,
    names: Sequence[str],
    target: Target,
    ranks: Backend | None,
    *,
    fallback: bool,
) -> Loaded:
    for number, name in enumerate(names):
        try:
            opening = partial(open_checkpoint if name else open_path, disk, path / name)
            return _load_from(opening, target, ranks)
        except CorruptCheckpointError as error:
            if not fallback or number + 1 == len(names):
                raise
            if target.rank == 0:
                following = names[number + 1]
                _warn(f"{path / name} is damaged and is passed over for {following}: {error}")
    raise AssertionError("there is always a candidate")


def _load_from(
    open_source: Callable[[], TensorSource], target: Target, ranks: Backend | None
) -> Loaded:
    """Stages on every rank, and commits if all have succeeded."""
    transactions: list[LoadTransaction] = []

    def resolve() -> list[Any]:
        transactions.append(LoadTransaction(open_source(), target))
        return transactions[0].resolve()

    found = together(ranks, resolve, "opening a checkpoint")
    mine = transactions[0]
    mine.check(found)
    together(ranks, mine.read, "reading a checkpoint")
    together(ranks, mine.apply_companions, "loading what goes with a model")
    mine.commit()
    for each in target.optimizers:
        if isinstance(each, ShardedOptimizer):
            each.note_load()
            if not isinstance(mine.source, MemorySource):
                each.note_checkpoint(mine.source.folder, dict(target.companions.items()))
    step = mine.source.values.get("step")
    step = step if isinstance(step, int) else None
    return Loaded(mine.extra, step, mine.source.folder, mine.misfits)


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=3)

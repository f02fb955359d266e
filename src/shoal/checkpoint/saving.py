"""`save`: every rank writes its part, rank 0 makes it valid, and all learn whether it is.

See `RunningSave` for the steps.
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint.disk.checkpoint_folder import MOST_STEP, CheckpointFolder
from shoal.checkpoint.disk.filesystem import DISK, FileSystem
from shoal.checkpoint.save import rank_state
from shoal.checkpoint.save.pending import PendingSave, finish_pending, start
from shoal.checkpoint.save.running_save import RunningSave
from shoal.checkpoint.state import model_state, training_state
from shoal.checkpoint.state.training_state import Companions
from shoal.comm import Backend
from shoal.strategies import ShardedModel


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
    ranks = model_state.ranks_of(model)
    finish_pending(ranks)
    if isinstance(model, ShardedModel):
        model.check_ranks("shoal.save()")
        model.synchronize_buffers()
    folder = CheckpointFolder(filesystem.absolute(Path(path)), filesystem)
    companions = Companions(scheduler, scaler, sampler)
    optimizers = training_state.as_list(optimizer)
    running = RunningSave(folder, ranks, step, keep, _written_by(model, ranks))
    running.prepare(
        lambda: rank_state.collect(model, optimizers, companions, extra or {}, running.rank)
    )
    return running.complete() if wait else start(running)


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
        "model": type(model_state.plain_module(model)).__name__,
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

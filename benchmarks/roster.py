"""Who takes part in a training contest, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from functools import partial

import deepspeed_trainees
from deepspeed_trainees import DeepSpeedTrainee
from shoal_trainees import STRATEGIES, ShoalTrainee
from torch_trainees import (
    Alone,
    FullyShard,
    FullyShardLeaves,
    Independent,
    TorchDDP,
    TorchZeRO1,
)
from trainee import Course, Trainee
from worlds import Venue

Entry = Callable[[Course, Venue], Trainee]

ALONE, INDEPENDENT = "alone", "independent"
DEEPSPEED = "deepspeed-"


def _over(backend: str, strategy: str) -> Entry:
    return lambda course, venue: ShoalTrainee(course, getattr(venue, backend), strategy)


ROSTER: dict[str, Entry] = {
    ALONE: Alone,
    INDEPENDENT: Independent,
    "torch-ddp": TorchDDP,
    "torch-zero1": TorchZeRO1,
    "fully-shard-block": FullyShard,
    "fully-shard-leaf": FullyShardLeaves,
    **{f"{DEEPSPEED}{stage}": partial(DeepSpeedTrainee, stage=stage) for stage in (1, 2, 3)},
    **{f"shm-{strategy}": _over("shm", strategy) for strategy in STRATEGIES},
    **{f"gloo-{strategy}": _over("gloo", strategy) for strategy in STRATEGIES},
}
COUNTERPARTS = {
    "ddp": "torch-ddp",
    "zero1": "torch-zero1",
    "zero2": "torch-zero1",
    "zero3": "fully-shard-block",
    "fsdp": "fully-shard-block",
}
"""What torch has for each strategy of shoal's; for ZeRO-2 the nearest is ZeRO-1."""


def counterpart(name: str) -> str | None:
    """What torch has for a contender of shoal's."""
    backend, _, strategy = name.partition("-")
    return COUNTERPARTS.get(strategy) if backend in ("shm", "gloo") else None


def choose(patterns: Iterable[str]) -> tuple[str, ...]:
    """Names in the order of the roster, from names and patterns such as ``shm-*``."""
    chosen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(ROSTER, pattern)
        if not matching:
            raise ValueError(f"{pattern!r} is none of {', '.join(ROSTER)}")
        chosen.update(matching)
    return tuple(name for name in ROSTER if name in chosen)


def why_not(name: str) -> str | None:
    """Why a contender cannot take part here; None if it can."""
    return deepspeed_trainees.why_not() if name.startswith(DEEPSPEED) else None

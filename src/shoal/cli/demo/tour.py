"""What the ranks of `shoal demo --tour comm` do: every collective once, some against the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import Backend
from shoal.comm.world import current
from shoal.errors import ShoalError

_REPETITIONS = 5


@dataclass(frozen=True)
class TourStep:
    """One operation on one rank: how it was called, what went in, what came out."""

    call: str
    given: str
    got: str


@dataclass(frozen=True)
class Visit:
    """What one rank brings back from the tour."""

    shown: list[TourStep]
    seconds: dict[tuple[str, int], float]
    """Median time by operation and bytes."""


@dataclass(frozen=True)
class Heard:
    """The error that a rank got because of another, and when."""

    kind: str
    text: str
    at: float


def visit(sizes: Sequence[int]) -> Visit:
    """Every collective once, then transfers of these sizes."""
    backend = current().backend
    return Visit(show_all(backend), measure(backend, sizes))


def show_all(backend: Backend) -> list[TourStep]:
    """Every operation on small numbers that tell the ranks apart."""
    rank, size = backend.rank, backend.size
    mine = torch.tensor([rank, 10 * rank])
    rows = torch.tensor([rank] * (1 + rank % 2))
    each = torch.arange(size) + 10 * rank
    six = torch.arange(6) if rank == 0 else None
    return [
        _show("all_reduce(t)", mine, lambda t: backend.all_reduce(t)),
        _show('all_reduce(t, "max")', mine, lambda t: backend.all_reduce(t, "max")),
        _show("reduce(t, root=1)", mine, lambda t: backend.reduce(t, root=1)),
        _show("broadcast(t, root=2)", mine, lambda t: backend.broadcast(t, root=2)),
        _show("all_gather(t)", rows, lambda t: backend.all_gather(t)),
        _show("gather(t, root=0)", rows, lambda t: backend.gather(t, root=0)),
        _show("scatter(t, root=0)", six, lambda t: backend.scatter(t, root=0)),
        _show("reduce_scatter(t)", each, lambda t: backend.reduce_scatter(t)),
        _show("all_to_all(t)", each, lambda t: backend.all_to_all(t)),
        _show("send, recv: a ring", mine, lambda t: _pass_on(backend, t)),
        _show("all_gather_object(x)", f"r{rank}", lambda x: backend.all_gather_object(x)),
        _show("barrier()", None, lambda _: backend.barrier()),
    ]


def _show(call: str, value: Any, operation: Callable[[Any], Any]) -> TourStep:
    given = _text(value)
    value = value.clone() if isinstance(value, Tensor) else value
    return TourStep(call, given, _text(operation(value)))


def _pass_on(backend: Backend, tensor: Tensor) -> Tensor:
    """To the next rank around the ring; a send ends when it was received, so it must not block."""
    work = backend.send(tensor, (backend.rank + 1) % backend.size, tag=7, async_op=True)
    received: Tensor = backend.recv(src=(backend.rank - 1) % backend.size, tag=7)
    work.wait()
    return received


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Tensor):
        return " ".join(map(str, value.tolist()))
    return " ".join(value) if isinstance(value, list) else str(value)


def measure(backend: Backend, sizes: Sequence[int]) -> dict[tuple[str, int], float]:
    """Median times of the slowest rank, on memory from `Backend.empty`."""
    seconds: dict[tuple[str, int], float] = {}
    for num_bytes in sizes:
        whole = backend.empty(num_bytes // 4, torch.float32).zero_()
        part = backend.empty(num_bytes // 4 // backend.size, torch.float32).zero_()
        reduce, gather = partial(backend.all_reduce, whole), partial(backend.all_gather, part)
        seconds["all_reduce", num_bytes] = _median(backend, reduce)
        seconds["all_gather", num_bytes] = _median(backend, partial(gather, out=whole))
    return seconds


def _median(backend: Backend, call: Callable[[], object]) -> float:
    call()
    samples = torch.zeros(_REPETITIONS, dtype=torch.float64)
    for repetition in range(_REPETITIONS):
        backend.barrier()
        begin = time.perf_counter()
        call()
        samples[repetition] = time.perf_counter() - begin
    backend.all_reduce(samples, "max")
    return float(statistics.median(samples.tolist()))


def play(source: str) -> Heard | None:
    """Runs a user's script, as ``train.py``; what it hears of other ranks is brought back.

    A rank's own exception is raised, with the time at which it came about.
    """
    namespace: dict[str, Any] = {}
    exec(compile(source, "train.py", "exec"), namespace)
    try:
        namespace["train"]()
    except ShoalError as error:
        return Heard(type(error).__name__, str(error), time.monotonic())
    except Exception as error:
        error.raised_at = time.monotonic()  # type: ignore[attr-defined]
        raise
    return None

"""What two real stages gain over one process on one core that runs the same micro-batches.

Everything is timed by turns, in an order that changes from round to round: one process on either
core, two independent ones on both, and two stages under each schedule. What is compared was
measured in the same round, because the cores of a virtual machine are not equally fast all the
time, and rounds in which others took part of the machine do not count.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt import Block, Shape
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.strategies.pipeline import SCHEDULES, bubble, make_schedule, simulate

TARGET = 1.77
MOST_SLOWDOWN = 1.02
MICRO_BATCHES = 32
# Of the time of all cores, in a round.
MOST_FOR_OTHERS = 0.03
# Much to compute for what is moved.
SHAPE = Shape(4, 512, batch=MICRO_BATCHES, length=128, heads=8)
SMALL = Shape(4, 128, batch=MICRO_BATCHES)
ALONE = ("alone on rank 0", "alone on rank 1")

Times = dict[str, list[float]]


class _Mark(NamedTuple):
    """Seconds: of the clock, all processes' on all cores (with what a host took away), own."""

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> _Mark:
        fields = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        idle = fields[3] + fields[4]
        busy = (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
        return cls(time.perf_counter(), busy, time.process_time())


def measure_speed(console: Console, is_quick: bool) -> dict[str, Any]:
    """Prints and returns what was found."""
    # Memory that is handed back and fetched anew would cost the runner that comes after another,
    # and small pages make what does not fit into the caches depend on the neighbours.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**30),
                   "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # fmt: skip
    shape, rounds = (SMALL, 2) if is_quick else (SHAPE, 6)
    results = shoal.run(_race, 2, "shm", args=(shape, rounds))
    kept = _undisturbed(console, [result["marks"] for result in results])
    times = _joined([_only(kept, result["times"]) for result in results])
    gains = {name: _ratios(times["one process"], times[name]) for name in times}
    console.print(f"blocks of a GPT of {shape}, 2 stages, {MICRO_BATCHES} micro-batches of one row")
    console.print(_table(times, gains, _only(kept, results[0]["bubbles"])))
    speedups = {name: _speedups(times, name) for name in SCHEDULES}
    for name, found in speedups.items():
        verdicts = ", ".join(
            f"{value:.2f} {kind} ({_verdict(value)})" for kind, value in found.items()
        )
        console.print(f"{name}, times one process (target {TARGET}): {verdicts}")
    slowdown = _slowdown(times, statistics.median)
    console.print(
        f"two independent processes slow each other by {slowdown - 1:.1%} in the median (at most "
        f"{MOST_SLOWDOWN - 1:.0%}), by {_slowdown(times, min) - 1:.1%} at best"
    )
    sent_bytes = [result["sent_bytes"] for result in results]
    theory = shape.batch * shape.length * shape.width * 4
    for rank, sent in enumerate(sent_bytes):
        console.print(f"stage {rank} sends {sent:,} bytes a step, by theory {theory:,}")
    return {"times": times, "slowdown": slowdown, "speedups": speedups, "sent_bytes": sent_bytes,
            "ranks": results}  # fmt: skip


def _undisturbed(console: Console, ranks: Sequence[Sequence[_Mark]]) -> list[int]:
    """The rounds that count: all of them, if others were busy all the time."""
    marks = list(zip(*ranks, strict=True))
    shares = [_share_of_others(begin, end) for begin, end in itertools.pairwise(marks)]
    kept = [number for number, share in enumerate(shares) if share <= MOST_FOR_OTHERS]
    console.print(
        f"others took {', '.join(f'{share:.1%}' for share in shares)} of the machine's time, by "
        f"round: {len(kept)} of {len(shares)} rounds count (at most {MOST_FOR_OTHERS:.0%})"
    )
    return kept or list(range(len(shares)))


def _share_of_others(begin: Sequence[_Mark], end: Sequence[_Mark]) -> float:
    own = sum(after.own - before.own for before, after in zip(begin, end, strict=True))
    busy, length = end[0].busy - begin[0].busy, end[0].clock - begin[0].clock
    return max(busy - own, 0.0) / (length * (os.cpu_count() or 1))


def _only(kept: Sequence[int], times: Times) -> Times:
    return {name: [found[number] for number in kept] for name, found in times.items()}


def _joined(ranks: Sequence[Times]) -> Times:
    """By round: what both ranks do ends with the slower, independent processes count each."""
    alone = [rank[name] for rank, name in zip(ranks, ALONE, strict=True)]
    both = [rank["two processes"] for rank in ranks]
    return {
        "one process": list(map(_mean, *alone)),
        "two processes": list(map(_mean, *both)),
        **{name: list(map(max, *(rank[name] for rank in ranks))) for name in SCHEDULES},
    }


def _mean(*values: float) -> float:
    return statistics.mean(values)


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def _speedups(times: Times, name: str) -> dict[str, float]:
    """Neighbours only ever make things slower: the best of each is what it takes by itself."""
    # Beside one that waits a process is no slower than beside one that works: where it was, that
    # was noise, and it must not count for the pipeline.
    median = statistics.median(_ratios(times["one process"], times[name]))
    quickest = min(*times["one process"], *times["two processes"])
    return {
        "by the median round": median * min(_slowdown(times, statistics.median), 1.0),
        "best against best": quickest / min(times[name]),
    }


def _slowdown(times: Times, typical: Callable[[list[float]], float]) -> float:
    return typical(times["two processes"]) / typical(times["one process"])


def _verdict(speedup: float) -> str:
    return "met" if speedup >= TARGET else "missed"


def _table(times: Times, gains: Times, bubbles: Times) -> Table:
    table = Table("", "seconds a step", "times one process, by round", "bubble", "by theory")
    for name in times:
        cells = [_with_spread(times[name], 3), _with_spread(gains[name], 2)]
        if name in bubbles:
            theory = bubble(simulate(make_schedule(name, 2, MICRO_BATCHES)))
            cells += [_with_spread(bubbles[name], 3), f"{theory:.3f}"]
        table.add_row(name, *cells)
    return table


def _with_spread(found: Sequence[float], digits: int) -> str:
    middle, low, high = statistics.median(found), min(found), max(found)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _race(shape: Shape, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    world = shoal.world()
    torch.manual_seed(0)
    x = torch.randn(shape.batch, shape.length, shape.width)
    train_alone = partial(_train_alone, _blocks(shape), x)
    runners: dict[str, Callable[[], None]] = {"two processes": train_alone}
    for rank, name in enumerate(ALONE):
        runners[name] = train_alone if rank == world.rank else _do_nothing
    models = {
        schedule: shoal.as_distributed(
            _blocks(shape), strategy="pipeline", schedule=schedule, micro_batches=MICRO_BATCHES
        )
        for schedule in SCHEDULES
    }
    runners |= {name: partial(_train_stages, model, x) for name, model in models.items()}
    names = list(runners)
    for name in names:  # the first time learns the route through the model
        runners[name]()
    times: Times = {name: [] for name in names}
    bubbles: Times = {name: [] for name in models}
    marks = []
    for number in range(rounds):
        world.barrier()
        marks.append(_Mark.now())
        for index in range(len(names)):
            name = names[(number + index) % len(names)]
            world.barrier()
            times[name].append(_timed(runners[name]))
            if name in models:
                bubbles[name].append(bubble(models[name].gather_trace()))
    world.barrier()
    marks.append(_Mark.now())
    before = world.stats()["send"].num_bytes
    runners["1f1b"]()
    sent_bytes = world.stats()["send"].num_bytes - before
    return {"times": times, "bubbles": bubbles, "marks": marks, "sent_bytes": sent_bytes}


def _train_stages(model: Any, x: torch.Tensor) -> None:
    model.zero_grad()
    model.train_step(x, x, F.mse_loss)


def _blocks(shape: Shape) -> nn.Module:
    return nn.Sequential(*(Block(shape) for _ in range(shape.layers)))


def _train_alone(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    for part in x.chunk(MICRO_BATCHES):
        (F.mse_loss(model(part), part) / MICRO_BATCHES).backward()


def _do_nothing() -> None:
    pass


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin

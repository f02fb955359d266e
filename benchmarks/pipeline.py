"""How much of the time the ranks of a pipeline wait, and what two real stages gain.

The first part has stages that sleep a known time instead of computing, so that two cores show four
stages; the bubble is measured from a trace and compared with theory. The second trains the
blocks of a GPT on two stages in 32 micro-batches, and in one process on one core that runs the
same micro-batches, by turns in one run, with two independent processes for comparison.

    python benchmarks/pipeline.py [--quick] [--parts bubble,speed]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpt import Block, Shape
from report import environment
from rich.console import Console
from rich.table import Table
from sleepers import Sleeper
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.strategies.pipeline import SCHEDULES, bubble, make_schedule, simulate

RESULTS = Path(__file__).parent / "results" / "pipeline.json"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Long beside what a pass costs otherwise, even with more ranks than cores.
SECONDS = 0.03
MOST_POINTS = 3.0
TARGET = 1.77
MOST_SLOWDOWN = 1.02


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Any] = {"environment": environment()}
    if "bubble" in options.parts:
        results["bubble"] = _bubbles(console, options.quick)
    if "speed" in options.parts:
        results["speed"] = _speed(console, options.quick)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {options.json}", soft_wrap=True)
    return 0


# Waiting ----------------------------------------------------------------------------------------


def _bubbles(console: Console, is_quick: bool) -> list[dict[str, Any]]:
    counts = (1, 4) if is_quick else MICRO_BATCHES
    table = Table("stages", "schedule", "micro-batches", "theory", "measured", "points off")
    rows = []
    for stages in (2, 3, 4):
        for schedule in SCHEDULES:
            for row in shoal.run(_wait, stages, "shm", args=(schedule, counts))[0]:
                rows.append({"stages": stages, "schedule": schedule, **row})
                off = 100 * abs(row["measured"] - row["theory"])
                table.add_row(
                    str(stages), schedule, str(row["micro_batches"]), f"{row['theory']:.3f}",
                    f"{row['measured']:.3f}", f"{off:.1f}{'' if off <= MOST_POINTS else ' !'}",
                )  # fmt: skip
    console.print(table)
    worst = max(100 * abs(row["measured"] - row["theory"]) for row in rows)
    verdict = "met" if worst <= MOST_POINTS else "missed"
    console.print(f"bubble within {MOST_POINTS:g} points of theory: {verdict} (worst {worst:.1f})")
    return rows


def _wait(schedule: str, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    stages = shoal.world().size
    chunks = 2 if schedule == "interleaved" else 1
    rows = []
    for count in counts:
        layers = [Sleeper(SECONDS / chunks) for _ in range(stages * chunks)]
        model = shoal.as_distributed(
            nn.Sequential(*layers), strategy="pipeline", schedule=schedule, micro_batches=count
        )
        x = torch.zeros(count, 4, requires_grad=True)
        measured = []
        for _ in range(2):
            model.train_step(x, x.detach(), F.mse_loss)
            measured.append(bubble(model.gather_trace()))
        theory = bubble(simulate(make_schedule(schedule, stages, count, chunks)))
        best = min(measured, key=lambda value: abs(value - theory))
        rows.append({"micro_batches": count, "theory": theory, "measured": best})
    return rows


# Speed ------------------------------------------------------------------------------------------


def _speed(console: Console, is_quick: bool) -> dict[str, Any]:
    shape = Shape(4, 128, batch=32) if is_quick else Shape(8, 384, batch=32)
    rounds = 2 if is_quick else 5
    result: dict[str, Any] = shoal.run(_race, 2, "shm", args=(shape, rounds))[0]
    slowdown, speedup = result["slowdown"], result["speedup"]
    console.print(f"blocks of a GPT of {shape}, 2 stages, 32 micro-batches of one sequence")
    console.print(f"two independent processes take {slowdown:.3f} times the time of one alone")
    verdict = "met" if speedup >= TARGET else "missed"
    if slowdown > MOST_SLOWDOWN:
        verdict += f", but these cores slow each other by more than {MOST_SLOWDOWN - 1:.0%}"
    console.print(f"2 stages: {speedup:.2f} times one process (target {TARGET}): {verdict}")
    return result


def _race(shape: Shape, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    world = shoal.world()
    torch.manual_seed(0)
    alone = _blocks(shape)
    model = shoal.as_distributed(_blocks(shape), strategy="pipeline", micro_batches=32)
    x = torch.randn(shape.batch, shape.length, shape.width)
    model.train_step(x, x, F.mse_loss)
    times: dict[str, list[float]] = {"alone": [], "both": [], "stages": []}
    for _ in range(rounds):
        if world.rank == 0:
            times["alone"].append(_timed(lambda: _train_alone(alone, x)))
        world.barrier()
        times["both"].append(_timed(lambda: _train_alone(alone, x)))
        world.barrier()
        times["stages"].append(_timed(lambda: model.train_step(x, x, F.mse_loss)))
        world.barrier()
    typical = {name: statistics.median(found) for name, found in times.items() if found}
    return {
        "times": times,
        "slowdown": typical["both"] / typical.get("alone", 1.0),
        "speedup": typical.get("alone", 1.0) / typical["stages"],
    }


def _blocks(shape: Shape) -> nn.Module:
    return nn.Sequential(*(Block(shape) for _ in range(shape.layers)))


def _train_alone(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    for part in x.chunk(32):
        (F.mse_loss(model(part), part) / 32).backward()


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and small: does it run at all?")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["bubble", "speed"])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""How much of the time the ranks of a pipeline wait, and what two real stages gain.

The first part has stages that sleep a known time instead of computing, so that two cores show four
stages; the bubble is measured from a trace and compared with theory. The second trains the
blocks of a GPT on two stages in 32 micro-batches under each schedule, and in one process on one
core that runs the same micro-batches, by turns in one run, with two independent processes for
comparison; the bytes that each stage sends are compared with theory.

    python benchmarks/pipeline.py [--quick] [--parts bubble,speed] [--stages 2,3,4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from pipeline_speed import measure_speed
from report import environment
from rich.console import Console
from rich.table import Table
from sleepers import Sleeper
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.strategies.pipeline import SCHEDULES, bubble, make_schedule, simulate
from shoal.strategies.pipeline.schedules import Span, needs

RESULTS = Path(__file__).parent / "results" / "pipeline.json"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# A pass through a chunk; long beside what it costs otherwise, even with more ranks than cores.
SECONDS = 0.03
SWEEPS = 4
MOST_POINTS = 3.0


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Any] = {"environment": environment()}
    if "bubble" in options.parts:
        results["bubble"] = _bubbles(console, options)
    if "speed" in options.parts:
        results["speed"] = measure_speed(console, options.quick)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {options.json}", soft_wrap=True)
    return 0


def _bubbles(console: Console, options: argparse.Namespace) -> list[dict[str, Any]]:
    counts = (1, 4) if options.quick else MICRO_BATCHES
    columns = ("stages", "schedule", "micro-batches", "theory", "measured", "spread", "off", "late")
    table = Table(*columns)
    rows = []
    for stages in options.stages:
        for schedule in SCHEDULES:
            for row in shoal.run(_wait, stages, "shm", args=(schedule, counts))[0]:
                rows.append({"stages": stages, "schedule": schedule, **row})
                table.add_row(*_cells(rows[-1]))
    console.print(table)
    worst = max(map(_points_off, rows))
    verdict = "met" if worst <= MOST_POINTS else "missed"
    console.print(f"bubble within {MOST_POINTS:g} points of theory: {verdict} (worst {worst:.1f})")
    console.print(
        f"a chunk sleeps {1e3 * SECONDS:g} ms forward, twice that backward (once, if weights have "
        "passes of their own); late: how long after it could have begun a pass begins, on average"
    )
    return rows


def _points_off(row: dict[str, Any]) -> float:
    return 100 * abs(statistics.median(row["measured"]) - row["theory"])


def _cells(row: dict[str, Any]) -> list[str]:
    measured, off = row["measured"], _points_off(row)
    return [
        str(row["stages"]), row["schedule"], str(row["micro_batches"]), f"{row['theory']:.3f}",
        f"{statistics.median(measured):.3f}", f"{min(measured):.3f} to {max(measured):.3f}",
        f"{off:.1f}{'' if off <= MOST_POINTS else ' !'}",
        f"{1e3 * statistics.median(row['late']):.2f} ms",
    ]  # fmt: skip


def _wait(schedule: str, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    stages = shoal.world().size
    chunks = SCHEDULES[schedule].default_chunks
    layers = [Sleeper(SECONDS) for _ in range(stages * chunks)]
    model = shoal.as_distributed(
        nn.Sequential(*layers), strategy="pipeline", schedule=schedule, micro_batches=max(counts)
    )
    traces: dict[int, list[list[Span]]] = {count: [] for count in counts}
    _sleep(model, 1)  # learns the route through the model
    for count in counts * SWEEPS:
        traces[count].append(_sleep(model, count))
    theory = {n: bubble(simulate(make_schedule(schedule, stages, n))) for n in counts}
    return [
        {
            "micro_batches": count,
            "theory": theory[count],
            "measured": list(map(bubble, found)),
            "late": [_lateness(trace, stages * chunks) for trace in found],
        }
        for count, found in traces.items()
    ]


def _sleep(model: Any, count: int) -> list[Span]:
    """A step with a micro-batch for each row; returns its trace."""
    x = torch.zeros(count, 4, requires_grad=True)
    model.train_step(x, x.detach(), F.mse_loss)
    trace: list[Span] = model.gather_trace()
    return trace


def _lateness(trace: list[Span], num_chunks: int) -> float:
    """How long after its rank was free and what it needs was there a pass begins, on average."""
    ended = {span.tick: span.stop for span in trace}
    free = dict.fromkeys({span.rank for span in trace}, min(span.start for span in trace))
    late = []
    for span in sorted(trace, key=lambda span: span.start):
        there = [ended[tick] for tick in needs(span.tick, num_chunks)]
        late.append(span.start - max([free[span.rank], *there]))
        free[span.rank] = span.stop
    return statistics.mean(late)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and small: does it run at all?")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["bubble", "speed"])
    parser.add_argument(
        "--stages", type=lambda text: [int(part) for part in text.split(",")], default=[2, 3, 4]
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Memory and step time of each strategy on 1, 2, 4 and 8 ranks; what grouping small layers saves.

The first part trains a GPT over shared memory on one global batch that the ranks divide, and
tells what a rank holds between steps and how long a step takes. The second trains a thousand
small layers over Gloo under ZeRO-3, with groups and with each layer by itself, and tells how
much of the communication is not hidden behind computation.

    python benchmarks/scaling.py [--quick] [--ranks 1,2,4,8] [--parts ranks,grouping]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import grouping
import scaling_contest
import scaling_report
from gpt import Shape
from report import environment
from rich.console import Console
from verdicts import print_judged

import shoal
from shoal.system.libc import num_cores

RESULTS = Path(__file__).parent / "results" / "scaling.json"
SHAPE = Shape(6, 256, batch=8)
PARTS = ("ranks", "grouping")
# Small layers are all latency; of large ones there are bytes to move, grouped or not.
WIDTHS = (32, 64, 256)


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Any] = {"environment": environment()}
    if "ranks" in options.parts:
        results["ranks"] = _compare_ranks(console, options)
    if "grouping" in options.parts:
        results["grouping"] = _compare_grouping(console, options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {options.json}", soft_wrap=True)
    return 0


def _compare_ranks(console: Console, options: argparse.Namespace) -> list[dict[str, Any]]:
    plan = scaling_contest.Plan(SHAPE, 2 if options.quick else 10)
    rows = []
    for ranks in options.ranks:
        console.print(f"measuring {ranks} ranks ...", style="dim")
        rows += shoal.run(scaling_contest.measure, ranks, "shm", args=(plan,))[0]
    title = f"GPT of {SHAPE} for all ranks together, over shared memory on {num_cores()} cores"
    console.print(scaling_report.scaling_table(title, rows))
    print_judged(console, "Targets", scaling_report.judge_scaling(rows, num_cores()))
    return rows


def _compare_grouping(console: Console, options: argparse.Namespace) -> list[dict[str, Any]]:
    layers, rounds = (100, 2) if options.quick else (1000, 6)
    rows = []
    for width in WIDTHS:
        chain = grouping.Chain(layers, width)
        console.print(f"measuring {chain} ...", style="dim")
        row: dict[str, Any] = shoal.run(grouping.measure, 2, "gloo", args=(chain, rounds))[0]
        console.print(scaling_report.grouping_table(row))
        rows.append(row)
    print_judged(console, "Targets", scaling_report.judge_grouping(rows))
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds, fewer layers: does it run?")
    add("--ranks", type=_numbers, default=(1, 2, 4, 8), help="default 1,2,4,8; they divide 8")
    add("--parts", type=_parts, default=PARTS, help=f"default {','.join(PARTS)}")
    add("--json", type=Path, default=RESULTS, help="where results go")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())

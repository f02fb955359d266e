"""Training steps of a small GPT on two processes: shoal against torch and DeepSpeed.

Independent processes that do not communicate, torch's DDP, `ZeroRedundancyOptimizer` and
`fully_shard`, DeepSpeed's ZeRO where it is installed, and every strategy of shoal's over shared
memory and over Gloo. All contenders live in the same two processes and take turns, a few steps
each, so that a machine that slows down slows down all of them. In the end they must have the
same parameters. Tells medians and quartiles, and whether the targets were met.

    python benchmarks/training.py [--quick] [--shapes 40x64] [--contenders independent,'shm-*']
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report
import training_report
from rich.console import Console
from roster import choose, why_not
from trainee import ADAMW, Course
from training_contest import Plan, hold
from training_targets import SHAPES

import shoal

RESULTS = Path(__file__).parent / "results" / "training.json"
ROUNDS, QUICK_ROUNDS = 10, 2
# A step of many small layers is short, so that several fit into a turn.
_STEPS = {"40x64": 2}


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    contenders = tuple(name for name in options.contenders if why_not(name) is None)
    for name in options.contenders:
        if reason := why_not(name):
            console.print(f"{name} is left out: {reason}", style="dim", highlight=False)
    about, rows = report.environment(), []
    console.print(f"load before: {about['load_average']:.1f}; anything else disturbs", style="dim")
    for key in options.shapes:
        console.print(f"measuring {SHAPES[key]} ...", style="dim")
        steps = options.steps or _STEPS.get(key, 1)
        plan = Plan(Course(SHAPES[key], options.adamw), contenders, options.rounds, steps)
        found = shoal.run(hold, ranks=2, backend="shm", args=(plan,))[0]
        training_report.print_table(console, found)
        rows += found
        report.save_json(options.json, rows, {**about, "adamw": options.adamw})
    training_report.print_legend(console)
    all_passed = training_report.print_verdicts(console, rows)
    console.print(f"written: {options.json}", soft_wrap=True)
    return 1 if options.check and not all_passed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds: does it run?")
    add("--shapes", type=_shapes, default=tuple(SHAPES), help=f"default {','.join(SHAPES)}")
    add("--contenders", type=_contenders, default=choose("*"), help="names or patterns")
    add("--rounds", type=int, help=f"turns of each contender, default {ROUNDS}")
    add("--steps", type=int, help="steps in a turn, default 1, and 2 for 40x64")
    add("--adamw", choices=ADAMW, default=ADAMW[0], help="default: AdamW(parameters, lr)")
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    add("--json", type=Path, default=RESULTS, help="where results go")
    options = parser.parse_args()
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def _shapes(text: str) -> tuple[str, ...]:
    keys = tuple(text.split(","))
    for key in keys:
        if key not in SHAPES:
            raise argparse.ArgumentTypeError(f"{key!r} is none of {', '.join(SHAPES)}")
    return keys


def _contenders(text: str) -> tuple[str, ...]:
    try:
        return choose(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())

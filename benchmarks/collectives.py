"""Collectives between the processes of one host: shared memory against Gloo and MPI.

All contenders live in the same processes and take turns, call by call, so that a machine that
slows down slows down all of them. Tells medians and quartiles, the floor of each operation (see
`contenders.floor_s`), and whether the targets were met.

    python benchmarks/collectives.py [--quick] [--sizes 4K,4M] [--ranks 2] [--ops all_reduce]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report
from contenders import OPERATIONS
from contest import Plan, hold
from rich.console import Console
from timing import parse_size, readable_size

import shoal

RESULTS = Path(__file__).parent / "results"
SIZES = "4K,16K,64K,256K,1M,4M,16M,64M"


def main() -> int:
    options = _options()
    plan = Plan(options.ops, options.sizes, options.repetitions, with_raw_mpi=options.mpi4py)
    console = Console(width=None if sys.stdout.isatty() else 180)
    about, rows = report.environment(), []
    for ranks in options.ranks:
        console.print(f"measuring {ranks} processes ...", style="dim")
        backend = "shm" if options.no_mpi else "mpi"
        rows += shoal.run(hold, ranks=ranks, backend=backend, args=(plan,))[0]
    report.print_tables(console, rows)
    all_passed = report.print_verdicts(console, rows)
    report.save_json(options.json, rows, about)
    pictures = [options.json.with_suffix(suffix) for suffix in (".png", ".svg")]
    for picture in pictures:
        report.save_plot(picture, rows)
    console.print(f"written: {', '.join(map(str, [options.json, *pictures]))}", soft_wrap=True)
    return 1 if options.check and not all_passed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few sizes and repetitions: does it run?")
    add("--sizes", type=_sizes, help=f"totals, default {SIZES}")
    add("--ranks", type=_numbers, help="numbers of processes, default 2,4")
    add("--ops", type=_operations, default=OPERATIONS, help=f"default {','.join(OPERATIONS)}")
    add("--repetitions", type=int, help="at small sizes, default 200; fewer at large ones")
    add("--no-mpi", action="store_true", help="leave MPI out; needs no mpiexec then")
    add("--mpi4py", action="store_true", help="also measure mpi4py without shoal")
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    add("--json", type=Path, default=RESULTS / "collectives.json", help="where results go")
    options = parser.parse_args()
    options.sizes = options.sizes or _sizes("4K,64K,4M" if options.quick else SIZES)
    options.ranks = options.ranks or (2, 4)
    options.repetitions = options.repetitions or (10 if options.quick else 200)
    for ranks in options.ranks:
        for size in options.sizes:
            if size % (4 * ranks):
                parser.error(
                    f"{readable_size(size)} is no whole number of floats for {ranks} ranks"
                )
    return options


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_size(size) for size in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

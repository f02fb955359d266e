"""How long `shoal.run` takes to start: the first run of a process and the second, in seconds.

Each measurement is a fresh Python that runs a function twice: one that does nothing, one that makes
an optimizer and steps it, and one that says in its name that it will. Several checkouts take turns,
so that a busy hour hits all of them:

    python benchmarks/startup.py OTHER/CHECKOUT .
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_PROBE = """
import json, sys, time
import torch, shoal
import startup_work

def optimizer():
    startup_work.training()

work, ranks = optimizer, int(sys.argv[2])
if sys.argv[1] != "optimizer":
    work = getattr(startup_work, sys.argv[1])
seconds = []
for _ in range(2):
    begin = time.perf_counter()
    shoal.run(work, ranks=ranks, backend="shm")
    seconds.append(time.perf_counter() - begin)
print(json.dumps(seconds))
"""


def main() -> None:
    """Measures every checkout in turns and prints medians and minima."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(".")])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(f"{options.ranks} ranks, {options.turns} turns: median (minimum) in seconds")
    for work in ("nothing", "training", "optimizer"):
        taken: dict[Path, list[list[float]]] = {checkout: [] for checkout in options.checkouts}
        for _ in range(options.turns):
            for checkout in options.checkouts:
                taken[checkout].append(_measure(checkout, work, options.ranks))
        for checkout, pairs in taken.items():
            first, second = (_describe(list(times)) for times in zip(*pairs, strict=True))
            print(f"{work:10} first {first}  second {second}  {checkout}")


def _measure(checkout: Path, work: str, ranks: int) -> list[float]:
    folder = Path(__file__).resolve().parent
    path = os.pathsep.join([str((checkout / "src").resolve()), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, work, str(ranks)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def _describe(times: list[float]) -> str:
    return f"{statistics.median(times):5.2f} ({min(times):5.2f})"


if __name__ == "__main__":
    main()

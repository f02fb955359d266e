"""What it costs that ranks agree before each collective, in relation to a training step.

For three shapes of a small GPT, on two processes: one step (forward, backward, AdamW), the
collectives that such a step makes when parameters are sharded (each group of parameters is
gathered in forward and in backward, and its gradients are reduce-scattered), and the agreement
alone: as many exchanges of headers without a payload, over the control page and over sockets.

    python benchmarks/agreement.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpt import Shape, Training
from report import environment
from rich.console import Console
from rich.table import Table
from timing import alternate, readable_time
from worlds import InnerBootstrap

import shoal
from shoal.comm import Backend
from shoal.comm.control.patience import Patience
from shoal.comm.control.sockets.sockets import SocketControl

SHAPES = (Shape(6, 256, batch=8), Shape(8, 384, batch=2), Shape(40, 64, batch=2))
TIMEOUT_S = 120.0
LIMIT = 0.05
RESULTS = Path(__file__).parent / "results" / "agreement.json"


def group_sizes(parameters: Sequence[int]) -> list[int]:
    """Elements of each group: one closes when it has max(1 MiB, total / 48) of float32."""
    threshold = max((1 << 20) / 4, sum(parameters) / 48)
    groups, current = [], 0
    for numel in parameters:
        current += numel
        if current >= threshold:
            groups.append(current)
            current = 0
    return [*groups, current] if current else groups


def measure(shape: Shape, repetitions: int) -> dict[str, Any]:
    """Called on every rank."""
    backend = shoal.world().backend
    training = Training(shape)
    numels = [parameter.numel() for parameter in training.model.parameters()]
    groups = group_sizes(numels)
    count = 3 * len(groups)
    with sockets(backend) as exchange:
        calls: dict[str, Callable[[], object]] = {
            "step": training.step,
            "collectives": collectives(backend, groups),
            "page": lambda: [backend.barrier() for _ in range(count)],
            "sockets": lambda: [exchange() for _ in range(count)],
        }
        alternate(calls, backend, 2)
        times = alternate(calls, backend, repetitions)
    return {
        "shape": str(shape),
        "parameters": sum(numels),
        "groups": len(groups),
        "count": count,
        "times_s": {name: each.as_dict() for name, each in times.items()},
    }


def collectives(backend: Backend, groups: Sequence[int]) -> Callable[[], None]:
    """What a step moves: gather each group, gather it again in backward, scatter its gradients."""
    padded = [numel + -numel % backend.size for numel in groups]
    full = [backend.empty(numel, torch.float32).zero_() for numel in padded]
    shards = [backend.empty(numel // backend.size, torch.float32).zero_() for numel in padded]

    def run() -> None:
        for whole, shard in zip(full, shards, strict=True):
            backend.all_gather(shard, out=whole)
        for whole, shard in reversed(list(zip(full, shards, strict=True))):
            backend.all_gather(shard, out=whole)
            backend.reduce_scatter(whole, "average", out=shard)

    return run


@contextlib.contextmanager
def sockets(backend: Backend) -> Iterator[Callable[[], object]]:
    """An exchange of headers over sockets, as between hosts, though these are on one."""
    control = SocketControl.connect(InnerBootstrap(backend))
    ranks = range(backend.size)
    channel = control.channel(0, ranks)
    header = b"a header of the usual length: all_gather(float32[rows]) at train.py:42".ljust(160)
    number = 0

    def exchange() -> list[bytes]:
        nonlocal number
        number += 1
        patience = Patience(control, lambda: "the benchmark", ranks, TIMEOUT_S)
        return channel.exchange(number, header, patience)

    try:
        yield exchange
        backend.barrier()
    finally:
        control.leave()
        control.close()


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each shape."""
    result = Table(title="Agreement before each collective, 2 processes", title_justify="left")
    for name in ("GPT", "step", "collectives", "their time", "agreement (page)", "of the step",
                 "agreement (sockets)", "of the step"):  # fmt: skip
        result.add_column(name, justify="right")
    for row in rows:
        median = {name: times["median"] for name, times in row["times_s"].items()}
        cells = [row["shape"], readable_time(median["step"])]
        cells += [str(row["count"]), readable_time(median["collectives"])]
        for plane in ("page", "sockets"):
            each = readable_time(median[plane] / row["count"])
            cells += [f"{readable_time(median[plane])}\n[dim]{each} each[/dim]"]
            cells += [f"{median[plane] / median['step']:.2%}"]
        result.add_row(*cells)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run?")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results go")
    options = parser.parse_args()
    repetitions = 5 if options.quick else 40
    about = environment()
    rows = [shoal.run(measure, 2, "shm", args=(shape, repetitions))[0] for shape in SHAPES]
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(rows))
    for row in rows:
        share = row["times_s"]["page"]["median"] / row["times_s"]["step"]["median"]
        word = "[green]PASS[/green]" if share <= LIMIT else "[red]FAIL[/red]"
        console.print(f"{word}  {row['shape']}: {share:.2%} of a step, at most {LIMIT:.0%} allowed")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": about, "results": rows}, indent=1) + "\n")
    console.print(f"written: {options.json}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

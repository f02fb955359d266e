"""What dropping activations saves in memory and costs in time.

A GPT on one rank, with each policy in turn: the memory that its blocks still hold at the end of
forward (as torch's allocator counts it) and the time of a training step; the same with "auto" at
five budgets. Then on several ranks, as threads: block inputs in parts over a tensor group, stages
of a pipeline that hold activations for each other, and backwards in two halves.

    python benchmarks/activations.py [--part policies floor auto partition peer halves]

On a GPU: `python benchmarks/activations.py --part policies --device cuda`
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from activation_floor import floor
from activation_ranks import Block, halves, partition, peer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from verdicts import Verdict, print_judged

import shoal

POLICIES = (None, "selective", "full")
BUDGETS = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Shares of what is held without a policy."""
MOST = {"full": (0.25, 1.35), "selective": (0.65, 1.1)}
"""Of the memory and of the time without a policy."""
NOISE = 0.03


class Spent(NamedTuple):
    """Bytes that blocks hold at the end of forward, and seconds of a step in each round."""

    num_bytes: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)


def held_bytes(model: nn.Module, x: Tensor) -> int:
    """What a forward has allocated and not freed, without its output."""
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = model(x)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before - output.nbytes
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        output = model(x)
    return sum(event.self_cpu_memory_usage for event in profile.events()) - output.nbytes


def step(model: Any, optimizer: Any, x: Tensor, clock: Callable[[], float]) -> float:
    begin = clock()
    model(x).square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    taken = clock() - begin
    optimizer.step()  # not timed: it is the same for all
    optimizer.zero_grad()
    return taken


def spend(
    arguments: argparse.Namespace, options: dict[str, Any], *, counts: bool
) -> tuple[int, float, int]:
    """Bytes of activations if they are counted, seconds of a step, bytes of everything else."""
    clock = time.perf_counter
    if arguments.clock == "cpu":
        clock = time.process_time
        torch.set_num_threads(1)  # those that wait for each other would count, too
    torch.manual_seed(0)
    blocks = (Block(arguments.width, arguments.width // 64) for _ in range(arguments.layers))
    module = nn.Sequential(*blocks).to(arguments.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    model, optimizer = shoal.as_distributed(module, optimizer, strategy="ddp", **options)
    x = torch.randn(arguments.batch, arguments.length, arguments.width, device=arguments.device)
    seconds = [step(model, optimizer, x, clock) for _ in range(5)][2:]
    uses = shoal.world().stats().memory
    others = sum(use.peak for name, use in uses.items() if name != "activations")
    return held_bytes(model, x) if counts else 0, statistics.median(seconds), others


def compare(
    arguments: argparse.Namespace, options: Mapping[str, dict[str, Any]]
) -> dict[str, Spent]:
    """What each contender spends; they take turns, each time in a world of its own."""
    backend = "nccl" if arguments.device == "cuda" else "memory"
    found: dict[str, Spent] = {}
    for number in range(arguments.rounds):
        for name, each in options.items():
            run = functools.partial(spend, arguments, each, counts=number == 0)
            ((num_bytes, seconds, _),) = shoal.run(run, 1, backend)
            found.setdefault(name, Spent(num_bytes, [])).seconds.append(seconds)
    return found


def show(title: str, found: Mapping[str, Spent], notes: Mapping[str, str] | None = None) -> None:
    table = Table(title=title)
    for column in ("activations", "MiB", "of none", "ms", "of none", "from", "to", ""):
        table.add_column(column, justify="left" if column in ("activations", "") else "right")
    least = found["none"]
    for name, spent in found.items():
        ratios = [mine / base for mine, base in zip(spent.seconds, least.seconds, strict=True)]
        table.add_row(
            name,
            f"{spent.num_bytes / 2**20:.1f}",
            f"{spent.num_bytes / least.num_bytes:.3f}",
            f"{1e3 * spent.median:.1f}",
            f"{spent.median / least.median:.3f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            (notes or {}).get(name, ""),
        )
    Console().print(table)


def policies(arguments: argparse.Namespace) -> list[tuple[str, list[Verdict]]]:
    """Memory and time of each policy on one rank."""
    words = (*POLICIES, "offload") if arguments.device == "cuda" else POLICIES
    found = compare(arguments, {word or "none": {"activations": word} for word in words})
    show("policies", found)
    judged = []
    for name, (memory, seconds) in MOST.items():
        parts = (
            found[name].num_bytes / found["none"].num_bytes,
            found[name].median / found["none"].median,
        )
        text = f"{name}: {parts[0]:.3f} of the memory, {parts[1]:.3f} of the time"
        passed = parts[0] <= memory and parts[1] <= seconds
        judged.append(
            (f"{name}: at most {memory} and {seconds}", [Verdict(passed=passed, text=text)])
        )
    return judged


def auto(arguments: argparse.Namespace) -> list[tuple[str, list[Verdict]]]:
    """What is chosen for five budgets, beside the policies that choose nothing."""
    fixed = {word or "none": {"activations": word} for word in POLICIES}
    run = functools.partial(spend, arguments, fixed["none"], counts=True)
    ((most, _, others),) = shoal.run(run, 1, "memory")
    limits = {f"auto {share}": int(share * most) for share in BUDGETS}
    chosen = {
        name: {"activations": "auto", "memory": others + limit} for name, limit in limits.items()
    }
    found = compare(arguments, fixed | chosen)
    notes = {name: f"at most {limit / 2**20:.1f} MiB" for name, limit in limits.items()}
    show("auto", found, notes)
    within, frontier = [], []
    for name, limit in limits.items():
        within.append(Verdict(found[name].num_bytes <= limit, f"{name}: {found[name].num_bytes}"))
        expected = on_frontier([found[each] for each in fixed], found[name].num_bytes)
        text = f"{name}: {found[name].median:.4f} s, on the frontier {expected:.4f}"
        frontier.append(Verdict(found[name].median <= (1 + NOISE) * expected, text))
    return [("auto is within its budget", within), ("auto is on the frontier", frontier)]


def on_frontier(fixed: list[Spent], num_bytes: int) -> float:
    """The time at which some bytes are reached by taking each policy for a part of the blocks."""
    best = min(each.median for each in fixed if each.num_bytes <= num_bytes)
    for small in fixed:
        for large in fixed:
            if small.num_bytes < num_bytes < large.num_bytes:
                part = (num_bytes - small.num_bytes) / (large.num_bytes - small.num_bytes)
                best = min(best, small.median + part * (large.median - small.median))
    return best


PARTS: dict[str, Callable[..., list[tuple[str, list[Verdict]]]]] = {
    "policies": policies,
    "floor": floor,
    "auto": auto,
    "partition": partition,
    "peer": peer,
    "halves": halves,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: what this process worked"
    )
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    sizes = {"layers": 12, "width": 256, "length": 256, "batch": 4, "rounds": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    judged = [each for name in arguments.part for each in PARTS[name](arguments)]
    sys.exit(not print_judged(Console(), "targets", judged))


if __name__ == "__main__":
    main()

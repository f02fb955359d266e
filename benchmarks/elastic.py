"""What it costs that ranks may come and go, and how long the loss of one is felt.

    python benchmarks/elastic.py              # all parts
    python benchmarks/elastic.py recovery     # from kill -9 of a rank to the next committed step
    python benchmarks/elastic.py overhead     # a step with its commit against one without
    python benchmarks/elastic.py memory       # bytes of the copies; time of re-sharding

Contenders take turns. A recovery ends when the last rank that trains has committed a step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gpt
import torch
from timing import Times, alternate, readable_time
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.elastic import Elastic

PARTS = ("recovery", "overhead", "memory")
STRATEGIES = ("ddp", "zero3")
LARGE = gpt.Shape(8, 384, batch=2)
SMALL = gpt.Shape(2, 64, batch=2, length=32)
TINY = gpt.Shape(1, 16, batch=2, length=8, heads=2)
TIMEOUT_S = 120.0
WAYS = {
    "fewer ranks": {},
    "a warm spare": {"spares": 1},
    "a cold restart": {"restarts": 1},
}
KILLED_AT = 6


class Plan(NamedTuple):
    """How much is measured."""

    ranks: int = 4
    rounds: int = 5
    shape: gpt.Shape = LARGE
    small: gpt.Shape = SMALL
    backends: tuple[str, ...] = ("shm", "gloo")
    strategies: tuple[str, ...] = STRATEGIES


def elastic_options(way: str, ranks: int) -> Elastic:
    """Where somebody takes the place of the lost rank, the others wait for that."""
    least = ranks - 1 if way == "fewer ranks" else ranks
    return Elastic(min_ranks=least, **WAYS[way])


# From a kill to the next step ----------------------------------------------------------------


def commits(shape: gpt.Shape, strategy: str, folder: str, delay: float) -> list[float]:
    """When this rank committed the steps after that in which rank 1 was killed."""
    torch.set_num_threads(1)
    world = shoal.world()
    membership = world.membership
    assert membership is not None
    is_victim = membership.generation == 1 and world.rank == 1
    torch.manual_seed(0)
    module = gpt.GPT(shape)
    tokens = torch.randint(gpt.VOCABULARY, (96, shape.length + 1))
    wrap: Any = shoal.as_distributed
    model, optimizer, loader = wrap(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        DataLoader(TensorDataset(tokens), batch_size=12, drop_last=True),
        strategy=strategy,
        elastic=True,
    )
    if membership.generation == 0:
        Path(folder, "spare").touch()
    found = []
    for _ in itertools.takewhile(lambda _: not found, loader.epochs(1000)):
        for (rows,) in loader:
            is_after = optimizer.generation > 1
            with optimizer.attempt():
                if is_victim and optimizer.num_committed == KILLED_AT:
                    begin_to_die(folder, delay)
                loss(model, rows).backward()
                optimizer.step()
                optimizer.zero_grad()
            if is_after and optimizer.has_committed:
                found.append(time.monotonic())
                break
    return found


def loss(model: Any, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def begin_to_die(folder: str, delay: float) -> None:
    """Kills this process somewhere in the step; a spare, if one is to come, waits already."""
    is_awaited = Path(folder, "awaits").exists()
    while is_awaited and not Path(folder, "spare").exists():
        time.sleep(0.01)

    def die() -> None:
        Path(folder, "died").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(delay, die).start()


def recover(plan: Plan, way: str, backend: str, strategy: str, delay: float) -> float:
    """Seconds from the kill to the step that the last rank commits."""
    with tempfile.TemporaryDirectory() as folder:
        if way == "a warm spare":
            Path(folder, "awaits").touch()
        args = (plan.small, strategy, folder, delay)
        found = shoal.run(
            commits, plan.ranks, backend, args=args, timeout=TIMEOUT_S,
            elastic=elastic_options(way, plan.ranks),
        )  # fmt: skip
        died = float(Path(folder, "died").read_text())
    return max(times[0] for times in found) - died


def measure_recovery(plan: Plan) -> dict[tuple[str, str], list[float]]:
    """All contenders in turn; the moment in the step and the strategy change with the round."""
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(plan.rounds):
        delay = 0.02 * turn / plan.rounds
        strategy = plan.strategies[turn % len(plan.strategies)]
        for way, backend in itertools.product(WAYS, plan.backends):
            seconds = recover(plan, way, backend, strategy, delay)
            found.setdefault((way, backend), []).append(seconds)
    return found


def show_recovery(plan: Plan) -> None:
    print(
        f"from kill -9 of one of {plan.ranks} ranks to the next committed step, {plan.rounds} kills"
    )
    print(f"of each; {', '.join(plan.strategies)} in turn")
    for (way, backend), seconds in measure_recovery(plan).items():
        print(f"  {way:15} {backend:5} median {statistics.median(seconds):6.3f} s"
              f"  ({min(seconds):.3f} to {max(seconds):.3f})", flush=True)  # fmt: skip


# What a commit costs ---------------------------------------------------------------------------


class Loop:
    """One of the two contenders."""

    def __init__(self, shape: gpt.Shape, strategy: str, *, is_elastic: bool) -> None:
        torch.manual_seed(0)
        module = gpt.GPT(shape)
        inner = torch.optim.AdamW(module.parameters(), lr=1e-4)
        wrap: Any = shoal.as_distributed
        options: dict[str, Any] = {"elastic": True} if is_elastic else {}
        self.model, self.optimizer = wrap(module, inner, strategy=strategy, **options)
        generator = torch.Generator().manual_seed(shoal.world().rank)
        shape_of_rows = (shape.batch, shape.length + 1)
        self._rows = torch.randint(gpt.VOCABULARY, shape_of_rows, generator=generator)

    def step(self) -> None:
        """Always on the same rows."""
        loss(self.model, self._rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def attempt(self) -> None:
        """The same with a commit."""
        with self.optimizer.attempt():
            self.step()


class Overhead(NamedTuple):
    """What one strategy's step takes; `cpu` is what all ranks together compute for a step."""

    plain: Times
    elastic: Times
    one_copy: Times
    shard_bytes: int
    cpu: dict[str, float]


class Metered:
    """A call whose processor time is noted, which other programs disturb less than its time."""

    def __init__(self, call: Any) -> None:
        self._call, self._seconds = call, list[float]()

    def __call__(self) -> None:
        """Calls it."""
        begin = time.process_time()
        self._call()
        self._seconds.append(time.process_time() - begin)

    def of_all_ranks(self) -> float:
        """The median of each rank, added."""
        own = torch.tensor([statistics.median(self._seconds)], dtype=torch.float64)
        return float(shoal.world().all_reduce(own).item())


def time_steps(shape: gpt.Shape, strategy: str, rounds: int) -> Overhead:
    """On a rank: both loops in turn, and one copy of what the rank keeps."""
    torch.set_num_threads(1)
    plain = Loop(shape, strategy, is_elastic=False)
    elastic = Loop(shape, strategy, is_elastic=True)
    for _ in range(2):
        plain.step()
        elastic.attempt()
    shard = elastic.optimizer.keeper.own[-1].data
    room = torch.empty_like(shard)
    calls = {
        "plain": Metered(plain.step),
        "elastic": Metered(elastic.attempt),
        "copy": Metered(lambda: room.copy_(shard)),
    }
    times = alternate(calls, shoal.world().backend, rounds, by_the_wall=("copy",))
    cpu = {name: call.of_all_ranks() for name, call in calls.items()}
    return Overhead(times["plain"], times["elastic"], times["copy"], shard.numel(), cpu)


def show_overhead(plan: Plan) -> None:
    print(f"a step of {plan.shape} on {plan.ranks} ranks, {plan.rounds} of each in turn")
    for backend, strategy in itertools.product(plan.backends, plan.strategies):
        args = (plan.shape, strategy, plan.rounds)
        found = shoal.run(
            time_steps, plan.ranks, backend, args=args, timeout=TIMEOUT_S, elastic=Elastic()
        )[0]
        more = found.elastic.median - found.plain.median
        cpu = {name: round(1000 * seconds) for name, seconds in found.cpu.items()}
        print(
            f"  {backend:5} {strategy:6} without {told(found.plain)}, with {told(found.elastic)}: "
            f"{100 * more / found.plain.median:+.1f} %\n"
            f"               processor time without {cpu['plain']} ms, with {cpu['elastic']} ms: "
            f"{100 * (cpu['elastic'] / cpu['plain'] - 1):+.1f} %; one copy of the "
            f"{found.shard_bytes / 1e6:.1f} MB that each rank keeps {cpu['copy']} ms",
            flush=True,
        )


def told(times: Times) -> str:
    """With the quartiles."""
    low, high = readable_time(times.low), readable_time(times.high)
    return f"{readable_time(times.median)} ({low} to {high})"


# Memory and re-sharding ------------------------------------------------------------------------


def change(shape: gpt.Shape, strategy: str) -> dict[str, float] | None:
    """Bytes of one rank's copies; the last rank leaves, and how long the others need for that."""
    torch.set_num_threads(1)
    loop = Loop(shape, strategy, is_elastic=True)
    world, optimizer, seconds = shoal.world(), loop.optimizer, []
    size = world.size
    recover = optimizer.recover

    def timed() -> None:
        begin = time.perf_counter()
        recover()
        seconds.append(time.perf_counter() - begin)

    optimizer.recover = timed
    for number in range(3):
        if number == 2 and world.rank == size - 1:
            world.leave()
        loop.attempt()
    while world.size == size:
        loop.attempt()
    keeper = optimizer.keeper
    parameters = sum(p.numel() for p in gpt.GPT(shape).parameters())
    return {
        "parameters": 4 * parameters,
        "kept": sum(part.data.numel() for part in keeper.parts),
        "rooms": sum(room.numel() for room in keeper.rooms),
        "seconds": seconds[0],
    }


def show_memory(plan: Plan) -> None:
    print(f"{plan.shape}, {plan.ranks} ranks of which one leaves; then, on one of the others:")
    for backend, strategy in itertools.product(plan.backends, plan.strategies):
        found = [
            shoal.run(change, plan.ranks, backend, args=(plan.shape, strategy),
                      timeout=TIMEOUT_S, elastic=Elastic())[0]
            for _ in range(plan.rounds)
        ]  # fmt: skip
        one, seconds = found[0], [each["seconds"] for each in found]
        print(
            f"  {backend:5} {strategy:6} parameters of the whole model "
            f"{one['parameters'] / 1e6:.1f} MB; kept {one['kept'] / 1e6:.1f} MB, memory for the "
            f"next commit {one['rooms'] / 1e6:.1f} MB; to the state over fewer ranks "
            f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})",
            flush=True,
        )


SHOW = {"recovery": show_recovery, "overhead": show_overhead, "memory": show_memory}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backends", nargs="*", default=["shm", "gloo"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model: only to try it out")
    parser.add_argument("--batch", type=int, default=LARGE.batch, help="rows of a rank")
    given = parser.parse_args(arguments)
    shapes = (TINY, TINY) if given.tiny else (replace(LARGE, batch=given.batch), SMALL)
    plan = Plan(given.ranks, given.rounds, *shapes, tuple(given.backends))
    for part in given.parts:
        SHOW[part](plan)


if __name__ == "__main__":
    main()

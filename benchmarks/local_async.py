"""What ranks that meet rarely or never move, and how fast they go; `losses.py` has the loss.

python benchmarks/local_async.py bytes     # local and DiLoCo against ddp, counted
python benchmarks/local_async.py pace      # three ranks, one five times slower by sleeping
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import shoal
from shoal.cli.demo import gpt as demo

SHAPE = demo.GPTShape(width=64, num_layers=2, num_heads=2, context=32, batch_size=24)
REPEATS = 3


def nesterov(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "local, every=10": {"strategy": "local", "every": 10},
    "local, every=50": {"strategy": "local", "every": 50},
    "DiLoCo, every=50": {"strategy": "local", "every": 50, "outer": nesterov},
    "async, drop": {"strategy": "async"},
    "async, damp": {"strategy": "async", "when_stale": "damp"},
    "async, wait": {"strategy": "async", "when_stale": "wait"},
    "gossip": {"strategy": "async", "topology": "gossip"},
}


# Tasks ------------------------------------------------------------------------------------


def digits_batch(step: int) -> tuple[Tensor, Tensor]:
    """Seven-segment digits of 8 x 8 pixels, moved, of any brightness and with much noise."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 10, (96,), generator=generator)
    segments = torch.tensor(
        [[1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 0, 1, 1],
         [0, 1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1, 1], [1, 1, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1, 0],
         [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1]], dtype=torch.float32
    )  # fmt: skip
    places = torch.zeros(7, 8, 8)
    for number, (rows, columns) in enumerate(
        [((0, 1), (1, 5)), ((0, 4), (1, 2)), ((0, 4), (4, 5)), ((3, 4), (1, 5)),
         ((3, 7), (1, 2)), ((3, 7), (4, 5)), ((6, 7), (1, 5))]
    ):  # fmt: skip
        places[number, slice(*rows), slice(*columns)] = 1
    images = torch.einsum("ns,shw->nhw", segments[labels], places).clamp(max=1)
    shift = int(torch.randint(0, 3, (), generator=generator))
    images = images.roll(shift, 2) * torch.rand(96, 1, 1, generator=generator)
    return images + 0.35 * torch.randn(96, 8, 8, generator=generator), labels


def text_task() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = demo.GPT(SHAPE)
    return model, AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def digits_task() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(options: dict[str, Any], steps: int) -> int:
    """The bytes that this rank has moved in training."""
    module, optimizer = text_task()
    wrap: Any = shoal.as_distributed
    model, optimizer = wrap(module, optimizer, **options)
    world = shoal.world()
    world.backend.reset_stats()
    for step in range(steps):
        inputs, targets = (rows.chunk(world.size)[world.rank] for rows in demo.batch(SHAPE, step))
        demo.loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(counter.num_bytes for counter in world.stats().values())


def show_bytes(steps: int, ranks: int) -> None:
    print(f"text, {steps} steps on {ranks} ranks: bytes of this rank's payloads in training")
    first = 0
    for case in [name for name in CASES if "async" not in name and name != "gossip"]:
        moved = max(shoal.run(train, ranks, "memory", args=(CASES[case], steps)))
        first = first or moved
        print(f"  {case:18} {moved:,} (1/{first / moved:.1f})", flush=True)


# Pace -------------------------------------------------------------------------------------


def keep_pace(
    options: dict[str, Any], seconds: float, busy: float, slow: float
) -> tuple[int, dict[int, int]]:
    """How many steps this rank makes in so many seconds, if rank 0 is so many times slower.

    A step sleeps ``busy`` seconds, which needs no core.
    """
    module, optimizer = digits_task()
    wrap: Any = shoal.as_distributed
    model, optimizer = wrap(module, optimizer, **options)
    world = shoal.world()
    pause = busy * (slow if world.rank == 0 else 1.0)
    inputs, targets = digits_batch(world.rank)
    count = 0
    world.barrier()
    end = time.perf_counter() + seconds
    is_over = False
    while not is_over:
        time.sleep(pause)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        is_over = time.perf_counter() > end
        if options["strategy"] == "ddp":  # ranks must make the same steps
            is_over = bool(world.agree(is_over))
    world.barrier()
    return count, dict(getattr(optimizer, "staleness", {}))


def show_pace(seconds: float, busy: float, backend: str, cases: list[str]) -> None:
    print(f"steps of three ranks in {seconds:g} s over {backend}, rank 0 five times slower or not")
    for case in cases:
        if "local" in case or "DiLoCo" in case:
            continue
        shares = []
        for _ in range(REPEATS):  # in turn: what else the machine does meets both
            alike, apart = (
                shoal.run(keep_pace, 3, backend, args=(CASES[case], seconds, busy, slow))
                for slow in (1, 5)
            )
            own, kept = ([count for count, _ in each] for each in (alike, apart))
            shares.append(sum(kept[1:]) / sum(own[1:]))
        share = statistics.median(shares)
        stale: Counter[int] = sum((Counter(each[1]) for each in apart), start=Counter())
        print(
            f"  {case:12} all alike {own}, one slow {kept}: the others keep {100 * share:.0f} %"
            + (f"; staleness {dict(sorted(stale.items()))}" if stale else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["bytes", "pace"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--busy", type=float, default=0.1)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part == "bytes":
        show_bytes(given.steps, given.ranks)
    else:
        show_pace(given.seconds, given.busy, given.backend, given.cases)


if __name__ == "__main__":
    main()

"""Where the loss ends with compressed gradients, local and asynchronous training.

    pip install scikit-learn                          # for the digits; nothing else needs it
    python benchmarks/losses.py digits compression    # scikit-learn's digits
    python benchmarks/losses.py text compression      # the demo's text
    python benchmarks/losses.py digits gathers        # parameters that are gathered in 8 bits
    python benchmarks/losses.py digits apart          # local, DiLoCo, asynchronous; also text

All contenders of a table see the same number of rows, and choose their learning rate from the same
few, by the mean loss of one seed or more; what is reported are other seeds. With one rate
(``--rates 0.4``) nothing is chosen. The loss is that of rows that no step has seen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import shoal
from shoal.cli.demo import gpt as demo

BATCH = 96
SHAPE = demo.GPTShape(width=32, num_layers=2, num_heads=2, context=32, batch_size=24)


@dataclass(frozen=True)
class Task:
    """Something to learn."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    unseen: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., Optimizer]
    rates: Sequence[float]
    steps: int


# Digits -----------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8 x 8 pixels and what they show, shuffled."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits are scikit-learn's: pip install scikit-learn") from None
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.data, dtype=torch.float32)[order] / 16
    return images, torch.tensor(found.target)[order]


NUM_UNSEEN = 360


def digits_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def digits_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images, labels = digits()
    rows = torch.randint(NUM_UNSEEN, len(labels), (BATCH,), generator=generator)
    return images[rows], labels[rows]


def digits_unseen() -> tuple[Tensor, Tensor]:
    images, labels = digits()
    return images[:NUM_UNSEEN], labels[:NUM_UNSEEN]


# Text -------------------------------------------------------------------------------------


def text_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the first nine tenths."""
    last = demo.text().numel() * 9 // 10 - SHAPE.context - 1
    starts = torch.randint(last, (SHAPE.batch_size, 1), generator=generator)
    pieces = demo.text()[starts + torch.arange(SHAPE.context + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def text_unseen() -> tuple[Tensor, Tensor]:
    """Pieces of the last tenth."""
    first, length = demo.text().numel() * 9 // 10, SHAPE.context + 1
    rows = (demo.text().numel() - first) // length
    pieces = demo.text()[first : first + rows * length].view(rows, length)[:1024]
    return pieces[:, :-1], pieces[:, 1:]


TASKS = {
    "digits": Task(
        digits_model, digits_batch, digits_unseen, F.cross_entropy,
        partial(SGD, momentum=0.9, weight_decay=3e-3), (0.025, 0.05, 0.1, 0.2, 0.4, 0.8), 1500,
    ),
    "text": Task(
        partial(demo.GPT, SHAPE), text_batch, text_unseen, demo.loss_fn,
        partial(SGD, momentum=0.9, nesterov=True), (0.1, 0.2, 0.4, 0.6, 0.8), 3000,
    ),
}  # fmt: skip


# Contenders -------------------------------------------------------------------------------


def nesterov(parameters: list[nn.Parameter], lr: float, momentum: float) -> Optimizer:
    return SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


CODECS = ("bf16", "int8", "int4", "sign", "topk:0.01", "randomk:0.01", "powersgd:2")
COMPRESSION: dict[str, dict[str, Any]] = {"uncompressed": {"strategy": "ddp"}}
for codec in CODECS:
    COMPRESSION[codec] = {"strategy": "ddp", "compression": codec}
    COMPRESSION[f"{codec}, no feedback"] = COMPRESSION[codec] | {"error_feedback": False}
APART: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "local, every=50": {"strategy": "local", "every": 50},
    **{
        f"DiLoCo {lr}/{momentum}": {
            "strategy": "local",
            "every": 50,
            "outer": partial(nesterov, lr=lr, momentum=momentum),
        }
        for lr, momentum in ((0.7, 0.9), (0.5, 0.9), (0.9, 0.9), (0.5, 0.8), (0.7, 0.8), (0.9, 0.8))
    },
    "async, drop": {"strategy": "async"},
    "async, damp": {"strategy": "async", "when_stale": "damp"},
    "async, wait": {"strategy": "async", "when_stale": "wait"},
    "gossip": {"strategy": "async", "topology": "gossip"},
}
PACKED = {"strategy": "zero3", "gather_compression": "int8"}
GATHERS: dict[str, dict[str, Any]] = {
    "float32": {"strategy": "zero3"},
    "int8": PACKED,
    "int8, gradients too": PACKED | {"compression": "int8"},
    "int8, bf16": PACKED | {"mixed_precision": "bf16"},
}
TABLES: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "compression": (COMPRESSION, 2),
    "gathers": (GATHERS, 2),
    "apart": (APART, 3),
}
"""Contenders, the one that the others are compared with first, and how many ranks."""


# Training ---------------------------------------------------------------------------------


def learn(name: str, options: Mapping[str, Any], rate: float, seed: int, steps: int) -> float:
    """The loss on rows that no step has seen; NaN if it diverged."""
    task = TASKS[name]
    torch.manual_seed(seed)
    module = task.make()
    optimizer: Any = task.optimizer(module.parameters(), lr=rate)
    options = dict(options)
    warm_up = steps // 10
    if "compression" in options:
        options["compression_warmup"] = warm_up
    wrap: Any = shoal.as_distributed
    model, optimizer = wrap(module, optimizer, **options)
    world = shoal.world()
    generator = torch.Generator().manual_seed(10**6 + seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm_up, 1 - step / steps)
        inputs, targets = (rows.chunk(world.size)[world.rank] for rows in task.batch(generator))
        task.loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return unseen_loss(task, model)


def unseen_loss(task: Task, model: Any) -> float:
    plain = task.make()
    plain.load_state_dict(model.state_dict())
    inputs, targets = task.unseen()
    with torch.no_grad():
        return task.loss_fn(plain(inputs), targets).item()


def measure(
    name: str, options: Mapping[str, Any], ranks: int, rate: float, seed: int, steps: int
) -> float:
    try:
        args = (name, options, rate, seed, steps)
        return shoal.run(learn, ranks, "memory", args=args)[0]
    except Exception as error:  # a learning rate that is too high is no failure of the benchmark
        print(f"  {options} at {rate}: {error}")
        return float("inf")


def show(
    name: str,
    table: str,
    tuning: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    wanted: Sequence[str],
    rates: Sequence[float],
) -> None:
    """A row for each contender: its rate by the mean of some seeds, its loss on others."""
    contenders, ranks = TABLES[table]
    print(f"{name}, {steps} steps, {ranks} ranks; tuned by {tuning}, then {seeds}; rates {rates}")
    print("| | learning rate | loss | against the first, by seed |")
    print("|---|---|---|---|")
    first: list[float] = []
    for case, options in contenders.items():
        if case not in wanted:
            continue
        begin = time.perf_counter()
        choices = rates if len(rates) > 1 else []
        tried = {
            rate: statistics.mean(
                measure(name, options, ranks, rate, seed, steps) for seed in tuning
            )
            for rate in choices
        }
        best = min(rates, key=lambda rate: _or_infinite(tried.get(rate, 0.0)))
        losses = [measure(name, options, ranks, best, seed, steps) for seed in seeds]
        first = first or losses
        gaps = [100 * (mine / its - 1) for mine, its in zip(losses, first, strict=True)]
        mean = 100 * (statistics.mean(losses) / statistics.mean(first) - 1)
        each = " ".join(f"{gap:+.1f}" for gap in gaps)
        print(
            f"| {case} | {best} | {statistics.mean(losses):.4f} | {mean:+.2f} % ({each}) |"
            f" tried {_rounded(tried.values())}, by seed {_rounded(losses)},"
            f" {time.perf_counter() - begin:.0f} s",
            flush=True,
        )


def _rounded(losses: Iterable[float]) -> list[float]:
    return [round(loss, 4) for loss in losses]


def _or_infinite(loss: float) -> float:
    return loss if loss == loss else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--tuned-by", type=int, default=1, help="how many seeds choose a rate")
    parser.add_argument("--seeds", type=int, default=3, help="how many others the table has")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--cases", nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[given.task]
    cases = given.cases or list(TABLES[given.table][0])
    show(
        given.task,
        given.table,
        range(given.tuned_by),
        range(given.tuned_by, given.tuned_by + given.seeds),
        given.steps or task.steps,
        cases,
        given.rates or task.rates,
    )


if __name__ == "__main__":
    main()

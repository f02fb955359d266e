"""Activations on several ranks, as threads: the parts of `activations.py` that need them."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from verdicts import Verdict

import shoal
from shoal.activations import Policy

MICRO_BATCHES = 8
WIDTH, LENGTH, LAYERS, WORDS = 64, 32, 16, 100
"""Of the model on several ranks: bytes do not depend on how large it is."""
Judged = list[tuple[str, list[Verdict]]]


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        parts = self.mix(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = parts.transpose(-3, -2).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(-3, -2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


def make_model(strategy: str, width: int = WIDTH, **options: Any) -> tuple[Any, Any]:
    torch.set_num_threads(1)  # each thread has its own
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(WORDS, width), *(Block(width, 4) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    return shoal.as_distributed(module, optimizer, strategy=strategy, **options)


def make_tokens(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(0))


# Block inputs over a tensor group ---------------------------------------------------------------


def kept_inputs(activations: str) -> int:
    """Bytes at the end of forward."""
    plan = {"*.up": "column", "*.down": "row"}
    model, _ = make_model("tensor", plan=plan, activations=activations)
    output = model(make_tokens(2, LENGTH))
    held = shoal.world().stats().memory["activations"].current
    output.sum().backward()
    return held


def partition(_: argparse.Namespace) -> Judged:
    """What each rank keeps of block inputs, beside what it keeps without partition."""
    table = Table("ranks", "KiB a rank, whole", "in parts", "of whole", title="partition")
    verdicts = []
    for ranks in (2, 3, 4, 8):
        (whole, *_), parts = (
            shoal.run(kept_inputs, ranks, "memory", args=(policy,))
            for policy in ("full", "partition")
        )
        share = max(parts) / whole
        table.add_row(str(ranks), f"{whole / 1024:.1f}", f"{max(parts) / 1024:.1f}", f"{share:.4f}")
        passed = abs(share * ranks - 1) <= 0.1
        verdicts.append(Verdict(passed, f"{ranks} ranks: {share:.4f} of the whole"))
    Console().print(table)
    return [("kept inputs are 1/t within 10 %", verdicts)]


# Pipelines --------------------------------------------------------------------------------------


def peaks(activations: Any) -> int:
    """The most that this stage held of activations in the second step."""
    model, optimizer = make_model(
        "pipeline", schedule="1f1b", micro_batches=MICRO_BATCHES, activations=activations
    )
    world = shoal.world()
    for _ in range(2):
        gc.collect()
        world.barrier()
        world.reset_stats()
        tokens = make_tokens(2 * MICRO_BATCHES, LENGTH)
        model.train_step(tokens, torch.zeros(*tokens.shape, WIDTH), F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return world.stats().memory["activations"].peak


def peer(_: argparse.Namespace) -> Judged:
    """The fullest of four stages, with and without activations on other stages."""
    table = Table("recompute", "store", "KiB by stage", "fullest of mean", title="peer")
    verdicts = []
    for recompute in ("full", "selective"):
        for store in ("local", "peer"):
            found = shoal.run(peaks, 4, "memory", args=(Policy(recompute, store),))
            share = max(found) / statistics.mean(found)
            stages = " ".join(f"{each / 1024:.0f}" for each in found)
            table.add_row(recompute, store, stages, f"{share:.2f}")
            if store == "peer":
                verdicts.append(Verdict(share <= 1.25, f"{recompute}: {share:.2f} of the mean"))
    Console().print(table)
    return [("the fullest of four stages is at most 1.25 of the mean", verdicts)]


def step_seconds(schedule: str, activations: Any, clock: str) -> float:
    """The time of the second step; stages are threads that take turns."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    width = 3 * WIDTH  # so that it is not the time of Python
    model, optimizer = make_model(
        "pipeline", width, schedule=schedule, micro_batches=MICRO_BATCHES, activations=activations
    )
    tokens = make_tokens(2 * MICRO_BATCHES, 4 * LENGTH)
    targets = torch.zeros(*tokens.shape, width)
    for _ in range(2):
        shoal.world().barrier()
        begin = now()
        model.train_step(tokens, targets, F.mse_loss)
        shoal.world().barrier()
        taken = now() - begin
        optimizer.step()
        optimizer.zero_grad()
    return taken


def halves(arguments: argparse.Namespace) -> Judged:
    """The time of "full" where a backward has two halves, and where it has one."""
    contenders = [(schedule, policy) for schedule in SCHEDULES for policy in (None, "full")]
    times: dict[Any, list[float]] = {each: [] for each in contenders}
    for _ in range(arguments.rounds):
        for each in contenders:
            found = shoal.run(step_seconds, 4, "memory", args=(*each, arguments.clock))
            times[each].append(max(found))
    _show_halves(times)
    return []


SCHEDULES = ("1f1b", "zero-bubble")


def _show_halves(times: Mapping[Any, list[float]]) -> None:
    table = Table("schedule", "activations", "ms", "of none", "from", "to", title="halves")
    for (schedule, policy), found in times.items():
        plain = times[schedule, None]
        ratios = [mine / base for mine, base in zip(found, plain, strict=True)]
        table.add_row(
            schedule,
            policy or "none",
            f"{1e3 * statistics.median(found):.0f}",
            f"{statistics.median(found) / statistics.median(plain):.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
        )
    Console().print(table)

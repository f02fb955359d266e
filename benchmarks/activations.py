"""What computing activations again saves in memory and costs in time.

A GPT on one rank, with each policy in turn: the memory that blocks still hold at the end of forward
(as torch's allocator counts it) and the time of a training step.

Run it: `python benchmarks/activations.py`, on a GPU with `--device cuda`
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

POLICIES = (None, "selective", "full")


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


def held_bytes(model: nn.Module, x: Tensor) -> int:
    """What a forward has allocated and not freed, without its output."""
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = model(x)
        return torch.cuda.memory_allocated() - before - output.nbytes
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        output = model(x)
    return sum(event.self_cpu_memory_usage for event in profile.events()) - output.nbytes


def step(model: Any, x: Tensor) -> float:
    begin = time.perf_counter()
    model(x).square().mean().backward()
    model.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Bytes and seconds by policy; policies take turns, medians count."""
    models = {}
    for policy in POLICIES:
        torch.manual_seed(0)
        blocks = (Block(arguments.width, arguments.width // 64) for _ in range(arguments.layers))
        module = nn.Sequential(*blocks).to(arguments.device)
        models[policy or "none"] = shoal.as_distributed(module, strategy="ddp", activations=policy)
    shape = (arguments.batch, arguments.length, arguments.width)
    x = torch.randn(shape, device=arguments.device)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(arguments.steps + 1):
        for name, model in models.items():
            times[name].append(step(model, x))
    return {
        name: (held_bytes(model, x), statistics.median(times[name][1:]))
        for name, model in models.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    for name, value in (
        ("layers", 12),
        ("width", 256),
        ("length", 256),
        ("batch", 4),
        ("steps", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    shoal.init("memory")
    found = measure(arguments)
    memory, seconds = found["none"]
    print(f"{'activations':12} {'MiB':>8} {'of none':>8} {'ms':>8} {'of none':>8}")
    for name, (num_bytes, taken) in found.items():
        print(
            f"{name:12} {num_bytes / 2**20:8.1f} {num_bytes / memory:8.2f} "
            f"{1e3 * taken:8.1f} {taken / seconds:8.2f}"
        )


if __name__ == "__main__":
    main()

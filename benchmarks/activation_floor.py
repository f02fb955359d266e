"""What computing activations again costs at least: torch's own checkpointing, without shoal.

python benchmarks/activations.py --part floor
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from activation_ranks import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from verdicts import Verdict

_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


def floor(arguments: argparse.Namespace) -> list[tuple[str, list[Verdict]]]:
    """Prints ratios to a step that keeps everything, by rounds in turn; judges nothing."""
    torch.manual_seed(0)
    blocks = [Block(arguments.width, arguments.width // 64) for _ in range(arguments.layers)]
    model = nn.Sequential(*blocks).to(arguments.device)
    x = torch.randn(arguments.batch, arguments.length, arguments.width, device=arguments.device)
    keeping = functools.partial(create_selective_checkpoint_contexts, _PRODUCTS)
    contenders: dict[str, Callable[[], None]] = {
        "everything is kept": lambda: step(model, blocks, x),
        "torch, all again": lambda: step(model, blocks, x, use_reentrant=False),
        "torch, products kept": lambda: step(
            model, blocks, x, use_reentrant=False, context_fn=keeping
        ),
        "a forward alone": torch.no_grad()(lambda: model(x)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2 * arguments.rounds + 1):
        for name, call in contenders.items():
            seconds[name].append(timed(call))
    base = seconds["everything is kept"][1:]
    for name, found in seconds.items():
        ratios = [mine / plain for mine, plain in zip(found[1:], base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:22} {middle:.3f} ({low:.3f} to {high:.3f})")
    return []


def step(model: nn.Module, blocks: list[Block], x: Tensor, **options: Any) -> None:
    """Forward and backward; with options, each block is a checkpoint of torch's."""
    y = x
    for block in blocks:
        y = checkpoint(block, y, **options) if options else block(y)
    y.square().mean().backward()
    model.zero_grad()


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin

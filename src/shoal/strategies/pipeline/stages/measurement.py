"""How long each unit of a model takes, so that chunks can be balanced by time."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from shoal.strategies.pipeline.stages.units import find_units
from shoal.strategies.training import call_module
from shoal.torch_internals.trees import tree_leaves


@torch.enable_grad()
def measure_units(
    module: nn.Module, inputs: Any, stages: int = 2, repeats: int = 3
) -> dict[str, float]:
    """Seconds of forward and backward of each unit, for ``balance=``.

    Call it before the module is wrapped, on a machine that holds all of it; buffers and random
    numbers move on as in any forward.

    Args:
        module: The plain module.
        inputs: As for ``train_step``: one micro-batch.
        stages: How many units there must be at least.
        repeats: How many runs; the fastest counts.

    Example:
        >>> balance = measure_units(module, inputs, stages=4)
        >>> model = shoal.as_distributed(module, strategy="pipeline", balance=balance)
    """
    names = {id(unit.module): unit.name for unit in find_units(module, stages)}
    best: dict[str, float] = {}
    for _ in range(repeats):
        watch = _Stopwatch(names)
        handles = [
            handle
            for part in module.modules()
            if id(part) in names
            for handle in (
                part.register_forward_pre_hook(watch.begin),
                part.register_forward_hook(watch.end),
            )
        ]
        call_module(module, module, inputs)
        for handle in handles:
            handle.remove()
        for name, seconds in watch.seconds.items():
            best[name] = min(seconds, best.get(name, seconds))
    return best


class _Stopwatch:
    """Times the forward of each unit and, right after that, its backward."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._begun: dict[int, float] = {}
        self.seconds: dict[str, float] = defaultdict(float)

    def begin(self, part: nn.Module, _: Any) -> None:
        self._begun[id(part)] = time.perf_counter()

    def end(self, part: nn.Module, args: Any, output: Any) -> None:
        name = self._names[id(part)]
        forward = time.perf_counter() - self._begun.pop(id(part))
        self.seconds[name] += forward + _time_backward(part, args, output)


def _time_backward(part: nn.Module, args: Any, output: Any) -> float:
    """Seconds of the backward of this unit alone, to its inputs and parameters."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
    wanted = [*inputs, *(p for p in part.parameters() if p.requires_grad)]
    if not tensors or not wanted:
        return 0.0
    gradients = [torch.ones_like(tensor) for tensor in tensors]
    begin = time.perf_counter()
    torch.autograd.grad(tensors, wanted, gradients, retain_graph=True, allow_unused=True)
    return time.perf_counter() - begin

"""What tensor, pipeline and hybrid parallelism move in a step, and how long it takes.

A GPT is trained by processes over shared memory. Bytes are counted by operation over all ranks and
compared with theory: sums of activations within a tensor group, activations and their gradients
between stages, gradients over the data axis. The time in collectives, without waiting for ranks
that come later, is compared with the time that the same collectives take alone. (A stage that
receives waits for others to compute; the bubble is measured by `pipeline.py`.)

    python benchmarks/parallel_costs.py [--steps 5] [--layers 4] [--width 256]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from gpt import GPT, VOCABULARY, Block, Shape
from rich.console import Console
from rich.table import Table
from timing import readable_size, readable_time
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm import Backend, Mesh

MICRO_BATCHES = 4
FLOAT = 4
KINDS = ("all_reduce", "all_gather", "send")
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Layout:
    """How many ranks along each axis."""

    strategy: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data

    @property
    def axes(self) -> dict[str, int]:
        """For a mesh."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}

    @property
    def options(self) -> dict[str, Any]:
        """What `as_distributed` is told."""
        if self.strategy == "tensor":
            return {"tensor": self.tensor}
        return {"pipeline": self.pipeline, "micro_batches": MICRO_BATCHES} | (
            {"tensor": self.tensor, "data": self.data} if self.strategy == "hybrid" else {}
        )

    @property
    def num_micro_batches(self) -> int:
        """Into how many a batch is cut."""
        return 1 if self.strategy == "tensor" else MICRO_BATCHES

    def __str__(self) -> str:
        return f"{self.strategy} {self.tensor}x{self.pipeline}x{self.data}"


LAYOUTS = (
    Layout("tensor", tensor=2),
    Layout("tensor", tensor=4),
    Layout("pipeline", pipeline=2),
    Layout("pipeline", pipeline=4),
    Layout("hybrid", tensor=2, pipeline=2),
    Layout("hybrid", tensor=2, pipeline=2, data=2),
)


class AnyHeads(Block):
    """Works on any number of heads."""

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Untied(GPT):
    """With a head of its own, so that its vocabulary can be split and nothing is shared."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blocks = nn.Sequential(*(AnyHeads(shape) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.places = nn.Embedding(shape.length, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """As the tied one."""
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.tokens(tokens) + places)))


@dataclass
class Found:
    """Of one rank, for a step.

    Attributes:
        moved: Bytes by operation.
        busy_s: Time in collectives once all ranks were there.
        alone_s: What the same collectives take when nothing else is done.
        held: Bytes of parameters.
        step_s: From begin to end.
    """

    moved: Counter[str]
    busy_s: float
    alone_s: float
    held: int
    step_s: float


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(layout: Layout, shape: Shape, steps: int) -> Found:
    """Called on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Untied(shape)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-4)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=layout.strategy, **layout.options
    )
    tokens = torch.randint(VOCABULARY, (shape.batch, shape.length + 1))
    own = tokens.chunk(layout.data)[model.data_group.rank]
    backend = shoal.world().backend
    for number in range(_WARM_UP_STEPS + steps):
        if number == _WARM_UP_STEPS:
            backend.barrier()
            backend.reset_stats()
            start = time.perf_counter()
        model.train_step(own[:, :-1], own[:, 1:], loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    step_s, counters = (time.perf_counter() - start) / steps, backend.stats()
    moved = Counter({name: each.num_bytes // steps for name, each in counters.items()})
    held = sum(p.numel() for p in held_parameters(model)) * FLOAT
    if layout.data == 1:  # a group of one counts its gradients, and moves nothing
        moved["all_reduce"] -= held
    alone_s = _alone(layout, shape, held, backend)
    return Found(moved, _busy(counters) / steps, alone_s, held, step_s)


def held_parameters(model: Any) -> list[Tensor]:
    """What this rank has of the model; a stage has some layers only."""
    return [p for p in model.module.parameters() if p.numel() and not p.is_meta]


def _busy(counters: Any) -> float:
    known = [counters[name] for name in ("all_reduce", "all_gather") if name in counters]
    return sum(each.seconds - each.waiting_seconds for each in known)


def _alone(layout: Layout, shape: Shape, held: int, backend: Backend) -> float:
    """The collectives of a step one after the other, with nothing between them."""
    mesh = Mesh(**layout.axes, world=backend)
    items = shape.batch * shape.length // layout.data // layout.num_micro_batches
    tensor, data, stages = (mesh.group(axis) for axis in ("tensor", "data", "pipeline"))
    part, gradients = torch.zeros(items, shape.width), torch.zeros(held // FLOAT)
    logits = torch.zeros(VOCABULARY // tensor.size, items)
    backend.reset_stats()
    for _ in range(layout.num_micro_batches if tensor.size > 1 else 0):
        for _ in range(num_sums(shape) // layout.pipeline):
            tensor.all_reduce(part)
        if stages.rank == stages.size - 1:
            tensor.all_gather(logits)
    data.all_reduce(gradients)
    return _busy(backend.stats())


# Theory -----------------------------------------------------------------------------------------


def activations(shape: Shape) -> int:
    """Bytes of what passes from one block to the next, for the whole batch."""
    return shape.batch * shape.length * shape.width * FLOAT


def num_sums(shape: Shape) -> int:
    """Two in a block forward and backward, one for the embedding and one for the head."""
    return 4 * shape.layers + 2


def expected(layout: Layout, shape: Shape, held: int) -> dict[str, int]:
    """Bytes by operation, over all ranks; ``held``: bytes of parameters that all of them hold."""
    hidden = activations(shape)
    sums = layout.tensor * num_sums(shape) * hidden if layout.tensor > 1 else 0
    logits = shape.batch * shape.length * VOCABULARY * FLOAT
    return {
        "all_reduce": sums + (held if layout.data > 1 else 0),
        "all_gather": layout.tensor * logits if layout.tensor > 1 else 0,
        "send": layout.tensor * 2 * (layout.pipeline - 1) * hidden,
    }


# Report -----------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    shape = Shape(options.layers, options.width, batch=8)
    table = Table(title=f"GPT of {shape}, a step, over shared memory", title_justify="left")
    for name in ("tensor x pipeline x data", "parameters a rank", *KINDS, "busy", "alone", "step"):
        table.add_column(name, justify="right")
    for layout in LAYOUTS:
        ranks = shoal.run(measure, layout.ranks, "shm", args=(layout, shape, options.steps))
        table.add_row(*_cells(layout, shape, ranks))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(
        "parameters: a rank's share; bytes: over all ranks (divided by theory); busy: a rank's "
        "time in collectives without waiting; alone: that of the same collectives by themselves"
    )
    return 0


def _cells(layout: Layout, shape: Shape, ranks: list[Found]) -> list[str]:
    whole = sum(p.numel() for p in Untied(shape).parameters()) * FLOAT
    held = sum(rank.held for rank in ranks)
    theory = expected(layout, shape, held)
    moved = sum((rank.moved for rank in ranks), Counter())
    busy, alone, step = (
        sum(getattr(rank, name) for rank in ranks) / len(ranks)
        for name in ("busy_s", "alone_s", "step_s")
    )
    return [
        str(layout),
        f"{held / len(ranks) / whole:.3f}",
        *(_compared(moved[kind], theory[kind]) for kind in KINDS),
        *map(readable_time, (busy, alone, step)),
    ]


def _compared(moved: int, theory: int) -> str:
    ratio = f" ({moved / theory:.3f})" if theory else ""
    return readable_size(moved) + ratio


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

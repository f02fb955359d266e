"""How long the host takes for a training step, beside one of plain PyTorch.

On a GPU the host only has to keep ahead of the device, so what counts is the time that it takes
itself. Here that is measured on a CPU, as the time of its thread on a core: a GPT of many layers
whose tensors are tiny, over a transport that costs nothing. The transport stands for two ranks, of
which the other does what this one does.

    python benchmarks/host_time.py [--quick] [--strategy zero3 ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, Shape
from report import environment
from timing import Times
from torch import Tensor, nn

import shoal
from shoal.comm import Backend, Work
from shoal.comm.operation import Operation
from shoal.comm.operation.base import Header
from shoal.comm.peer_tensors.lending import LendingSource, PeerTensors
from shoal.comm.world import World, set_current
from shoal.comm.world_state import WorldState

SHAPE = Shape(24, 32, batch=1, length=16)
STRATEGIES = ("ddp", "zero2", "zero3")
LIMIT = 1.5
PHASES = ("forward", "backward", "step")


class DoneWork(Work[Any]):
    """What was over when it began."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> Any:
        """Does not wait."""
        return self._result

    def is_done(self) -> bool:
        """Always."""
        return True


class CostlessBackend(Backend):
    """Ranks that are all in the same place, and have what this one has."""

    name = "costless"

    def run(self, operation: Operation, *, async_op: bool = False) -> Any:
        """Moves what this rank has to where the others' would be."""
        header = Header(operation.signature, operation.meta, b"", "")
        payload = operation.prepare([header] * self.size, self.rank)
        if operation.kind == "all_gather":
            payload.gotten.view(self.size, -1).copy_(payload.given.expand(self.size, -1))
        elif operation.kind == "reduce_scatter":
            count = payload.gotten.numel()
            payload.gotten.copy_(payload.given[self.rank * count :][:count])
        result = operation.result()
        return DoneWork(result) if async_op else result

    def all_gather_object(self, value: Any) -> list[Any]:
        """The same from every rank."""
        return [value] * self.size

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """The root has the same."""
        return value

    def _message(self, operation: Operation, peer: int, tag: int, async_op: bool) -> Any:
        raise NotImplementedError

    def _make_group(self, members: Sequence[int], group_id: int) -> Backend:
        return CostlessBackend(self._state, members, self.rank)

    def lend(self, source: LendingSource) -> PeerTensors:
        """Nothing of the kind is measured here."""
        raise NotImplementedError

    def fail(self, reason: str, *, culprit: int | None = None) -> None:
        """There is nobody to tell."""

    def shutdown(self) -> None:
        """There is nothing to free."""


class Trainee:
    """A model in training, whose phases are timed one by one."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(0)
        model: Any = GPT(SHAPE)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if strategy != "plain":
            # A group for each layer, as models have that are worth a GPU.
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy=strategy, min_group_bytes=_layer_bytes(model)
            )
        self._model, self._optimizer = model, optimizer
        self._tokens = torch.randint(VOCABULARY, (SHAPE.batch, SHAPE.length + 1))

    def step(self) -> list[float]:
        """Seconds of forward, backward and the optimizer's step."""
        moments = [time.thread_time()]
        logits = self._model(self._tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        moments.append(time.thread_time())
        loss.backward()
        moments.append(time.thread_time())
        self._optimizer.step()
        self._optimizer.zero_grad()
        moments.append(time.thread_time())
        return [after - before for before, after in itertools.pairwise(moments)]


def _layer_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.get_submodule("blocks.0").parameters())


def measure(strategies: Sequence[str], repetitions: int) -> dict[str, dict[str, Times]]:
    """Contenders take turns; each begins as often as the others."""
    set_current(World(CostlessBackend(WorldState(), range(2), 0)), process_wide=True)
    trainees = {name: Trainee(name) for name in ("plain", *strategies)}
    samples: dict[str, list[list[float]]] = {name: [] for name in trainees}
    names = list(trainees)
    for round_number in range(repetitions + 5):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            took = trainees[name].step()
            if round_number >= 5:  # the order is learned, and memory is there
                samples[name].append(took)
    return {name: _by_phase(torch.tensor(taken).double()) for name, taken in samples.items()}


def _by_phase(taken: Tensor) -> dict[str, Times]:
    columns = {phase: taken[:, number] for number, phase in enumerate(PHASES)}
    columns["passes"] = taken[:, :2].sum(1)
    return {phase: Times.of(column) for phase, column in columns.items()}


def report(found: dict[str, dict[str, Times]]) -> str:
    """A table in Markdown: milliseconds, and how often plain's."""
    lines = [
        "| | forward, ms | backward, ms | step, ms | forward and backward of plain's |",
        "|---|---|---|---|---|",
    ]
    plain = found["plain"]["passes"].median
    for name, phases in found.items():
        cells = [f"{1e3 * phases[phase].median:.2f}" for phase in PHASES]
        passes = phases["passes"]
        ratio = (
            f"{passes.median / plain:.2f} ({passes.low / plain:.2f} to {passes.high / plain:.2f})"
        )
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.strategy, 20 if options.quick else 200)
    print(report(found))
    if options.json:
        times = {n: {p: t.as_dict() for p, t in phases.items()} for n, phases in found.items()}
        options.json.write_text(
            json.dumps({"environment": environment(), "times": times}, indent=1)
        )


if __name__ == "__main__":
    main()

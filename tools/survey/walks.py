"""Counts what lies on the way of five things that users do, on 2 ranks with tiny models.

It is started by `survey`, once with each package on ``PYTHONPATH``, and prints JSON. Everything is
done several times, and the shortest record kept: how often a rank has to wait differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorder import Recorder

Walk = dict[str, Any]
Walks = dict[str, Walk]
NUM_TIMES = 4


def package() -> str:
    import shoal

    return os.path.dirname(shoal.__file__)


class Notebook:
    """The shortest record of each walk."""

    def __init__(self) -> None:
        self.walks: Walks = {}

    def record(self, name: str, walked: Callable[[], Any]) -> Any:
        """Returns what the call returned."""
        recorder = Recorder(package())
        with recorder.recording():
            result = walked()
        self.add(name, recorder.walk())
        return result

    def add(self, name: str, walk: Walk) -> None:
        """Keeps the shorter of this and what was added before."""
        self.walks[name] = min(self.walks.get(name, walk), walk, key=lambda each: each["hops"])


def all_reduce() -> Walks:
    import torch

    import shoal

    world, notebook = shoal.world(), Notebook()
    small, large = torch.ones(256), torch.ones(2 * 2**20)
    notebook.record("all_reduce 1 KiB, first call", lambda: world.all_reduce(small))
    for _ in range(NUM_TIMES):
        notebook.record("all_reduce 1 KiB", lambda: world.all_reduce(small))
        notebook.record("all_reduce 8 MiB", lambda: world.all_reduce(large))
    return notebook.walks


def build(strategy: str, num_layers: int = 2, **options: Any) -> tuple[Any, Any]:
    import torch
    from torch import nn

    import shoal

    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return shoal.as_distributed(model, optimizer, strategy=strategy, **options)


def batch() -> Any:
    """Another one on each rank, as data parallelism expects."""
    import torch

    import shoal

    return torch.full((8, 16), 1.0 + shoal.world().rank)


def zero3_step(transport: str) -> Walks:
    notebook, rows = Notebook(), batch()
    model, optimizer = build("zero3", min_group_bytes=0)
    for step in range(2 + NUM_TIMES):
        used = notebook if step >= 2 else Notebook()  # the first steps prepare things
        loss = used.record(f"zero3 forward, {transport}", lambda: model(rows).sum())
        used.record(f"zero3 backward, {transport}", loss.backward)
        used.record(f"zero3 step, {transport}", optimizer.step)
        optimizer.zero_grad()
    return notebook.walks


def pipeline_step() -> Walks:
    import torch
    from torch.nn import functional as F

    notebook, rows = Notebook(), torch.ones(8, 16)
    model, optimizer = build("pipeline", num_layers=4, schedule="1f1b", micro_batches=4)
    for step in range(2 + NUM_TIMES):
        used = notebook if step >= 2 else Notebook()
        used.record("pipeline 1f1b step", lambda: model.train_step(rows, rows, F.mse_loss))
        optimizer.step()
        optimizer.zero_grad()
    return notebook.walks


def save_and_load(folder: str) -> Walks:
    import shoal

    notebook = Notebook()
    model, optimizer = build("zero3")
    model(batch()).sum().backward()
    optimizer.step()
    for step in range(NUM_TIMES):
        notebook.record("save zero3", lambda: shoal.save(folder, model, optimizer, step=step))  # noqa: B023
        notebook.record("load zero3", lambda: shoal.load(folder, model, optimizer))
    return notebook.walks


def on_ranks(walk: Callable[..., Walks], backend: str, *args: Any) -> Walks:
    """What rank 0 of two saw."""
    import shoal

    found: list[Walks] = shoal.run(walk, ranks=2, backend=backend, args=args)
    return found[0]


def launches() -> Walks:
    notebook = Notebook()
    for _ in range(NUM_TIMES):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, __file__, "launcher", folder], check=True)
            for name in ("launcher", "rank"):
                text = Path(folder, name).read_text(encoding="utf-8")
                notebook.add(f"launch, {name}", json.loads(text))
    return notebook.walks


def launcher(folder: str) -> None:
    """Is the launcher of two ranks, and records itself."""
    import shoal.cli

    recorder = Recorder(package())
    sys.argv = ["shoal", "launch", "-n", "2", "--backend", "shm", __file__, "rank", folder]
    try:
        with recorder.recording():
            shoal.cli.main()
    except SystemExit as ending:
        if ending.code:
            raise
    Path(folder, "launcher").write_text(json.dumps(recorder.walk()), encoding="utf-8")


def rank(folder: str) -> None:
    """Is a rank of a launch, and records itself until it has a world."""
    import shoal.api

    recorder = Recorder(package())
    with recorder.recording():
        world = shoal.api.init()
    with world:
        if world.rank == 0:
            Path(folder, "rank").write_text(json.dumps(recorder.walk()), encoding="utf-8")


def everything() -> Walks:
    with tempfile.TemporaryDirectory() as folder:
        return {
            **on_ranks(all_reduce, "shm"),
            **on_ranks(zero3_step, "memory", "memory"),
            **on_ranks(zero3_step, "shm", "shm"),
            **on_ranks(pipeline_step, "shm"),
            **on_ranks(save_and_load, "shm", folder),
            **launches(),
        }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"launcher": launcher, "rank": rank}[sys.argv[1]](sys.argv[2])
    else:
        print(json.dumps(everything()))

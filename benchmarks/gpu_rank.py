"""One rank of one contender in the contest on GPUs; `gpu.py` starts it and says when to begin."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import MODELS, adamw, dtype_on, loss_of
from gpu_trace import STEP
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import shoal
from shoal.activations import Policy

TORCH = ("torch-ddp", "fully_shard")
SHOAL = ("ddp", "zero1", "zero2", "zero3", "fsdp")
CONTENDERS = ("alone", *TORCH, *SHOAL)
WAYS = {
    "selective": Policy("selective"),
    "full": Policy("full"),
    "inputs": Policy("full", "host"),
    "fifth": Policy("none", "host", blocks=["blocks.*[05]"]),
    "offload": Policy("none", "host"),
}
"""What shoal does with activations, as in "zero3+offload".

"inputs" are those of blocks, on the host; "fifth" is all that every fifth block keeps, on the host.
"""
WITH_WAYS = tuple(f"{strategy}+{way}" for strategy in SHOAL for way in WAYS)


@dataclass(frozen=True)
class Turn:
    """What the ranks of one contender do.

    Attributes:
        model: A name of `MODELS`.
        contender: One of `CONTENDERS` or of `WITH_WAYS`.
        device: "cuda" or "cpu".
        steps: How many are timed.
        warm_up: How many are made before.
        trace: Where rank 0 writes a trace of one more step; None for no trace.
    """

    model: str
    contender: str
    device: str
    steps: int
    warm_up: int
    trace: str | None = None

    def as_json(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))


class Trainee:
    """A contender's model in training, on one rank."""

    def __init__(self, turn: Turn, stack: contextlib.ExitStack) -> None:
        """Connects the ranks; the stack ends that."""
        subject, rank = MODELS[turn.model], int(os.environ["RANK"])
        self.device = torch.device(turn.device, int(os.environ["LOCAL_RANK"]))
        if self.is_on_gpu:
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
        backend = "nccl" if self.is_on_gpu else "gloo"
        model = subject.model(self.device, dtype_on(self.device))
        self._model, self._optimizer = _distribute(model, turn.contender, backend, stack)
        self._tokens = subject.batch(rank, self.device)
        self.num_steps = 0
        if self.is_on_gpu:
            torch.cuda.empty_cache()  # what making the model took, if ranks share the GPU

    @property
    def is_on_gpu(self) -> bool:
        """Or else on a CPU, where nothing is to be synchronized."""
        return self.device.type == "cuda"

    def step(self) -> torch.Tensor:
        """Forward, backward, AdamW; returns the loss."""
        self.num_steps += 1
        loss = loss_of(self._model, self._tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def synchronize(self) -> None:
        """Waits until the GPU has done what it was given."""
        if self.is_on_gpu:
            torch.cuda.synchronize(self.device)

    def about(self) -> dict[str, Any]:
        """What it runs on."""
        if not self.is_on_gpu:
            return {"device": "cpu"}
        return {
            "device": torch.cuda.get_device_name(self.device),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }


def _distribute(
    model: Any, contender: str, backend: str, stack: contextlib.ExitStack
) -> tuple[nn.Module, Any]:
    strategy, _, way = contender.partition("+")
    if strategy in SHOAL:
        stack.enter_context(shoal.init(backend=backend))
        options = {"strategy": strategy, "activations": WAYS.get(way)}
        return shoal.as_distributed(model, adamw(model), **options)
    if contender in TORCH:
        dist.init_process_group(backend)
        stack.callback(dist.destroy_process_group)
        model = _by_torch(model, contender)
    return model, adamw(model)


def _by_torch(model: Any, contender: str) -> nn.Module:
    if contender == "torch-ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def measure(trainee: Trainee, turn: Turn, parent: Connection) -> dict[str, Any]:
    """What this rank's steps took, in seconds, and what they held, in bytes."""
    for _ in range(turn.warm_up):
        trainee.step()
    trainee.synchronize()
    if trainee.is_on_gpu:
        torch.cuda.reset_peak_memory_stats(trainee.device)
    step_s, host_s, loss = [], [], torch.tensor(float("nan"))
    for _ in range(turn.steps):
        begin = _meet(parent)
        loss = trainee.step()
        host_s.append(time.perf_counter() - begin)
        trainee.synchronize()
        step_s.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated(trainee.device) if trainee.is_on_gpu else None
    found = {"step_s": step_s, "host_s": host_s, "peak_bytes": peak, "loss": float(loss)}
    return {**found, "about": trainee.about()}


def _meet(parent: Connection) -> float:
    """Waits for all ranks; returns the moment at which all of them go on.

    The parent names a moment that lies a little ahead, and the host has one clock for all. So it
    does not matter which rank wakes up first.
    """
    parent.send(None)
    moment: float = parent.recv()
    while (now := time.perf_counter()) < moment:
        pass
    return now


def write_trace(trainee: Trainee, path: str, *, is_writer: bool) -> None:
    """Every rank makes the same steps; the first is the profiler's own warm-up."""
    traced = trainee.num_steps + 2
    if traced & (traced - 1) == 0:  # shoal compares more in steps 1, 2, 4, 8, ...
        trainee.step()
    if not is_writer:
        for _ in range(2):
            trainee.step()
            trainee.synchronize()
        return
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * trainee.is_on_gpu]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        for _ in range(2):
            with record_function(STEP):
                trainee.step()
            trainee.synchronize()
            profiler.step()


def main() -> None:
    turn, parent = Turn(**json.loads(sys.argv[1])), Connection(int(sys.argv[2]))
    with contextlib.ExitStack() as stack:
        trainee = Trainee(turn, stack)
        # Sent before anything else can fail.
        parent.send(measure(trainee, turn, parent))
        if turn.trace is not None:
            write_trace(trainee, turn.trace, is_writer=os.environ["RANK"] == "0")


if __name__ == "__main__":
    main()

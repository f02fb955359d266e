"""Parity on a GPU: threads as ranks, processes over Gloo, and NCCL."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from gpus import over_nccl
from shoal.strategies.engine.gather_buffers import FILL_VARIABLE
from strategies.models import OWN, TASKS, Batch, moved
from strategies.training import OPTIMIZERS, STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

each = pytest.mark.parametrize("strategy", STRATEGIES)
STEPS = 6


class Judged(nn.Module):
    """A task's model together with its loss."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.inner = TASKS[task].build()
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        return TASKS[self._task].loss(self.inner, batch)


def itself(loss: Tensor, _: object) -> Tensor:
    return loss


def built(task: str, optimizer: str = "adamw") -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        model = Judged(task).cuda()
        optimizers = OPTIMIZERS[optimizer](model)
        batches = [(moved(TASKS[task].batch(step, 12), "cuda"), None) for step in range(STEPS)]
        return model, optimizers if len(optimizers) > 1 else optimizers[0], batches, itself

    return build


@each
@pytest.mark.parametrize("task", OWN)
def test_threads_as_ranks(strategy: str, task: str) -> None:
    report = shoal.verify(
        built(task),
        strategy,
        3,
        "memory",
        STEPS,
        TASKS[task].reference,
        tolerance=max(1e-9, TASKS[task].tolerance),
        min_group_bytes=1000,
    )
    assert report.equal, str(report)


@each
def test_batch_norm_over_all_ranks(strategy: str) -> None:
    options = {"tolerance": 1e-9, "sync_batchnorm": True}
    report = shoal.verify(built("resnet"), strategy, 3, "memory", STEPS, "batch", **options)
    assert report.equal, str(report)


@pytest.mark.filterwarnings("ignore:LBFGS may couple")
@each
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon", "lbfgs"])
def test_optimizers(strategy: str, optimizer: str) -> None:
    amplifies = optimizer in ("adafactor", "muon")
    reference, tolerance = ("split", 1e-5) if amplifies else ("batch", 1e-9)
    build = built(next(iter(OWN)), optimizer)
    report = shoal.verify(build, strategy, 2, "memory", STEPS, reference, tolerance=tolerance)
    assert report.equal, str(report)


@each
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_processes_over_gloo(strategy: str, backend: str) -> None:
    """Shared memory carries no CUDA tensors, and says so."""
    if backend == "shm":
        with pytest.raises(Exception, match="CPU tensors"):
            shoal.verify(built(next(iter(OWN))), strategy, 2, backend, 1)
        return
    report = shoal.verify(built(next(iter(OWN))), strategy, 2, backend, STEPS, tolerance=1e-9)
    assert report.equal, str(report)


@each
def test_nccl_alone(strategy: str) -> None:
    report = shoal.verify(built(next(iter(OWN))), strategy, 1, "nccl", STEPS, tolerance=1e-9)
    assert report.equal, str(report)


@over_nccl(2)
@each
@pytest.mark.parametrize("task", OWN)
def test_nccl(strategy: str, task: str) -> None:
    tolerance = max(1e-9, TASKS[task].tolerance)
    reference = TASKS[task].reference
    options: Any = {"tolerance": tolerance, "min_group_bytes": 1000}
    report = shoal.verify(built(task), strategy, 2, "nccl", STEPS, reference, **options)
    assert report.equal, str(report)


def build_narrow() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    batches = [(torch.randn(8, 16).cuda(), torch.randn(8, 8).cuda()) for _ in range(STEPS)]
    return model, optimizer, batches, F.mse_loss


@over_nccl(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_operations_of_all_groups_in_one_queue(strategy: str) -> None:
    """The GPU carries out one after the other, and memory that is freed is made worthless."""
    code = (
        "import shoal; from strategies.test_gpu import STEPS, built\n"
        f"report = shoal.verify(built('experts'), {strategy!r}, 2, 'nccl', STEPS, 'split', "
        "tolerance=1e-9, min_group_bytes=1000)\nassert report.equal, str(report)"
    )
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", FILL_VARIABLE: "1"}
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, done.stderr


def train_beside_a_group_of_the_script() -> list[float]:
    device = shoal.world().backend.device
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")  # at the master that `shoal.run` names
    try:
        model, optimizer, batches, loss_fn = build_narrow()
        model, optimizer = shoal.as_distributed(model, optimizer, strategy="zero3")
        losses = []
        for inputs, targets in batches:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())
            losses.append(loss.item())
        return losses
    finally:
        dist.destroy_process_group()


@over_nccl(2)
def test_beside_a_group_of_the_script() -> None:
    """It is left alone, and used between the operations of a model."""
    alone = shoal.run(train_alone, 1, "memory")[0]
    for losses in shoal.run(train_beside_a_group_of_the_script, 2, "nccl", timeout=60):
        assert losses == pytest.approx([2 * loss for loss in alone], rel=1e-4)


def train_alone() -> list[float]:
    model, optimizer, batches, loss_fn = build_narrow()
    losses = []
    for inputs, targets in batches:
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@each
@pytest.mark.parametrize("backend", ["memory", pytest.param("nccl", marks=over_nccl(2))])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision(strategy: str, backend: str, dtype: str) -> None:
    report = shoal.verify(
        build_narrow,
        strategy,
        2,
        backend,
        STEPS,
        "split",
        tolerance=1e-6,
        mixed_precision=dtype,
    )
    assert report.equal, str(report)


def scale_and_clip(strategy: str) -> list[float]:
    model, optimizer, batches, loss_fn = build_narrow()
    model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    scaler = shoal.optim.GradScaler(init_scale=4.0, growth_interval=2)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_fn(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        losses.append(model.clip_grad_norm_(0.1).item())
        scaler.step(optimizer)
        scaler.update()
    return losses


@each
def test_autocast_scaler_and_clipping(strategy: str) -> None:
    alone = shoal.run(scale_and_clip, 1, "memory", args=("ddp",))[0]
    for norms in shoal.run(scale_and_clip, 2, "memory", args=(strategy,)):
        assert norms == pytest.approx(alone, rel=1e-4)


class OnBoth(nn.Module):
    """A large table stays on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6)
        self.layers = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3)).cuda()
        self.register_buffer("scale", torch.ones(3).cuda())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.table(tokens).cuda()) * self.scale


def train_on_both(strategy: str | None) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = OnBoth().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    rank, size = 0, 1
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        rank, size = shoal.world().rank, shoal.world().size
    norms = []
    for step in range(STEPS):
        tokens = torch.randint(50, (12,), generator=torch.Generator().manual_seed(step))
        model(tokens.chunk(size)[rank]).square().mean().backward()
        clip = nn.utils.clip_grad_norm_
        kind = 2.0 if step % 2 else float("inf")
        args = (0.05, kind)
        norm = clip(model.parameters(), *args) if size == 1 else model.clip_grad_norm_(*args)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


@each
def test_models_on_two_devices(strategy: str) -> None:
    norms, expected = train_on_both(None)
    for own_norms, state in shoal.run(train_on_both, 3, "memory", args=(strategy,)):
        assert own_norms == pytest.approx(norms, rel=1e-9)
        for name, value in expected.items():
            assert state[name].device == value.device
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def memory_per_step(strategy: str) -> list[int]:
    """What is allocated after each step; of all ranks, which share the device."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
    model = model.to_empty(device="cuda")
    for part in model:
        part.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    held, world = [], shoal.world()
    for _ in range(WARM_UP_STEPS + 8):
        model(torch.ones(2, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        world.barrier()  # no rank is in the middle of a step, with parameters gathered for it
        gc.collect()
        held.append(torch.cuda.memory_allocated())
        world.barrier()
    return held[WARM_UP_STEPS:]


WARM_UP_STEPS = 6
"""Until each thread has the workspace that cuBLAS takes with its first product of a kind."""


@each
def test_memory_does_not_grow(strategy: str) -> None:
    for held in shoal.run(memory_per_step, 2, "memory", args=(strategy,)):
        assert max(held) - min(held) < 1 << 20, held


def memory_over_many_steps(folder: str) -> list[int]:
    """What is allocated after each of 200 steps, in whose middle the model is saved."""
    model, optimizer, batches, loss_fn = build_narrow()
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy="zero3", min_group_bytes=1000
    )
    held = []
    for step in range(200):
        inputs, targets = batches[step % len(batches)]
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 100:
            shoal.save(folder, model, optimizer, wait=True)
        torch.cuda.synchronize()
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    return held[WARM_UP_STEPS:]


@over_nccl(2)
def test_memory_over_nccl_does_not_grow(tmp_path: Path) -> None:
    for held in shoal.run(memory_over_many_steps, 2, "nccl", args=(str(tmp_path),), timeout=60):
        assert max(held) - min(held) < 1 << 18, held

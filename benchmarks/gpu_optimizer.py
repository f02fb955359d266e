"""AdamW's step on the flat memory of `zero3` against plain AdamW over the same parameters.

One rank alone: it has all of a group's flat memory, and steps it as it would step its part. Beside
them the device copies memory. AdamW reads four tensors (parameters, gradients, two of state) and
writes three, so a step that moves its bytes as fast as a copy takes a time that can be told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from gpt import Shape
from gpu_models import MODELS, Subject, adamw, dtype_on, loss_of
from rich.console import Console
from timing import Times, readable_time
from torch import nn

import shoal

# 0.84 billion parameters. The batch only serves to have gradients.
GPT = Subject(Shape(24, 1600, batch=1, length=16, heads=25), 32000)
COPIED_BYTES = 1 << 30
_TENSORS_MOVED = 7
_WARM_UP = 3


class Stepper:
    """A model whose optimizer's step can be timed again and again."""

    def __init__(self, subject: Subject, device: torch.device, *, is_sharded: bool) -> None:
        plain = subject.model(device, dtype_on(device))
        self.num_bytes = sum(parameter.nbytes for parameter in plain.parameters())
        self._model: nn.Module = plain
        self._optimizer: Any = adamw(plain)
        if is_sharded:
            self._model, self._optimizer = shoal.as_distributed(
                plain, self._optimizer, strategy="zero3"
            )
        self._tokens = subject.batch(0, device)

    def prepare(self) -> None:
        """New gradients."""
        self._optimizer.zero_grad()
        loss_of(self._model, self._tokens).backward()

    def step(self) -> None:
        """What is timed."""
        self._optimizer.step()


class Copier:
    """Copies memory on the device."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._from, self._to = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def step(self) -> None:
        """What is timed."""
        self._to.copy_(self._from)


def measure(device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Contenders take turns; a row for each."""
    subject, copied = (GPT, COPIED_BYTES) if device.type == "cuda" else (MODELS["tiny"], 1 << 20)
    with shoal.init(backend="nccl" if device.type == "cuda" else "gloo"):
        contenders = {
            "plain": Stepper(subject, device, is_sharded=False),
            "zero3": Stepper(subject, device, is_sharded=True),
        }
        copier = Copier(device, copied)
        times = _alternate({**contenders, "copy": copier}, device, repetitions)
    num_bytes = {name: _TENSORS_MOVED * each.num_bytes for name, each in contenders.items()}
    num_bytes["copy"] = 2 * copied
    return [
        {
            "contender": name,
            "step": taken["step"].as_dict(),
            "host": taken["host"].as_dict(),
            "moved_bytes": num_bytes[name],
            "bytes_per_s": num_bytes[name] / taken["step"].median,
        }
        for name, taken in times.items()
    ]


def _alternate(
    contenders: dict[str, Any], device: torch.device, repetitions: int
) -> dict[str, dict[str, Times]]:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(_WARM_UP + repetitions):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = _time(contenders[name], synchronize)
            if number >= _WARM_UP:
                samples[name].append(taken)
    columns = {name: torch.tensor(taken).double().T for name, taken in samples.items()}
    return {n: {"host": Times.of(c[0]), "step": Times.of(c[1])} for n, c in columns.items()}


def _time(contender: Any, synchronize: Callable[[], None]) -> tuple[float, float]:
    """Until the call returned, and until the device was done."""
    contender.prepare()
    synchronize()
    begin = time.perf_counter()
    contender.step()
    host = time.perf_counter() - begin
    synchronize()
    return host, time.perf_counter() - begin


def _nothing() -> None:
    """A CPU is done when the call returns."""


def hold(console: Console, device_type: str, repetitions: int, path: Path | None) -> int:
    """Measures, tells and writes; returns the exit status."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    rows = measure(device, repetitions)
    plain, *_, copy = rows
    for row in rows:
        at_copy_rate = row["moved_bytes"] / copy["bytes_per_s"]
        step, host = row["step"], row["host"]
        console.print(
            f"{row['contender']}: {readable_time(step['median'])} "
            f"({readable_time(step['low'])} to {readable_time(step['high'])}), "
            f"host {readable_time(host['median'])}, "
            f"{row['bytes_per_s'] / 1e9:.0f} GB/s; {step['median'] / plain['step']['median']:.3f} "
            f"of plain, {step['median'] / at_copy_rate:.2f} of the time at the rate of the copy"
        )
    if path is not None:
        name = torch.cuda.get_device_name() if device_type == "cuda" else "cpu"
        report.save_json(path, rows, report.environment() | {"device": name})
    return 0

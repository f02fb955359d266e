"""What a script does beside its steps: a rank is lost in it, and replaced, and the end is the same.

Saves and evaluations in attempts of their own, gradients that are accumulated around them, steps
that a scaler leaves out, epochs that are left early, a scheduler between epochs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from elastic import faults
from shoal.elastic import Elastic

# A rank that takes another's place may begin with a scheduler's step, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
RANKS, NUM_SAMPLES, BATCH = 3, 36, 6


@pytest.fixture(autouse=True)
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


class Training:
    """What the scripts have in common; rank 1 has its fuse lit after the second step."""

    def __init__(self, strategy: str, nth: int, batch: int = BATCH) -> None:
        world = shoal.world()
        is_first = world.membership is None or world.membership.generation == 1
        self._nth = nth if is_first and world.rank == 1 else 0
        self._fuse: faults.Fuse | None = None
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        x = torch.randn(NUM_SAMPLES, 3)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        loader = DataLoader(data, batch_size=batch, shuffle=True)
        wrap: Any = shoal.as_distributed
        self.model, self.optimizer, self.loader = wrap(
            module, optimizer, loader, strategy=strategy, elastic=True
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", 2.0**20, growth_interval=2)
        self.optimizer.also += [self.scheduler, self.scaler]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with self.optimizer.attempt():
            self.loss(x, y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.note()

    def note(self) -> None:
        if self._nth and self._fuse is None and self.optimizer.num_committed == 2:
            self._fuse = faults.light(self._nth)

    def save(self, folder: str) -> None:
        with self.optimizer.attempt():
            shoal.save(folder, self.model, self.optimizer, sampler=self.loader)

    def result(self) -> dict[str, Any]:
        count = 0 if self._fuse is None else self._fuse.count
        faults.light(-1)
        return {
            "operations": count,
            "state": [
                self.optimizer.num_committed,
                self.optimizer.num_in_window,
                self.scaler.get_scale(),
                self.scheduler.state_dict()["last_epoch"],
                {name: value.clone() for name, value in self.model.state_dict().items()},
            ],
        }


def accumulate_and_save(strategy: str, nth: int, folder: str) -> dict[str, Any]:
    """Two attempts a step, and a save after every second step, which is at the end of epochs."""
    training = Training(strategy, nth, BATCH)
    optimizer = training.optimizer
    for _ in training.loader.epochs(2):
        for x, y in training.loader:
            with optimizer.attempt():
                is_last = optimizer.num_in_window == 1
                with contextlib.nullcontext() if is_last else training.model.no_sync():
                    training.loss(x, y).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
            if optimizer.has_committed and optimizer.num_committed % 3 == 0:
                training.save(folder)
            training.note()
    return training.result()


def leave_steps_out(
    strategy: str, nth: int, folder: str, *, drops_first: bool = False
) -> dict[str, Any]:
    """Two attempts a step; the scaler finds infinities in the last one of two epochs.

    ``drops_first``: gradients are forgotten before they are accumulated, not after a step.
    """
    training = Training(strategy, nth)
    optimizer, scaler = training.optimizer, training.scaler
    for epoch in training.loader.epochs(3):
        for x, y in training.loader:
            with optimizer.attempt():
                if drops_first and optimizer.num_in_window == 0:
                    optimizer.zero_grad()
                is_last = optimizer.num_in_window == 1
                is_bad = scaler.get_scale() == 2.0**21 and epoch < 2
                with contextlib.nullcontext() if is_last else training.model.no_sync():
                    loss = training.loss(x, y) * (float("inf") if is_bad else 1.0)
                    scaler.scale(loss).backward()
                if is_last:
                    scaler.unscale_(optimizer)
                    training.model.clip_grad_norm_(0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    if not drops_first:
                        optimizer.zero_grad()
            training.note()
    return training.result()


def leave_epochs_early(strategy: str, nth: int, folder: str) -> dict[str, Any]:
    training = Training(strategy, nth)
    for _ in training.loader.epochs(3):
        for x, y in training.loader:
            training.step(x, y)
            if training.loader.state_dict()["batches"] == 4:
                break
    return training.result()


def accumulate_over_epochs(strategy: str, nth: int, folder: str) -> dict[str, Any]:
    """Four attempts a step, of six batches an epoch; what is between epochs is done again."""
    training = Training(strategy, nth)
    optimizer = training.optimizer
    for _ in training.loader.epochs(3):
        for x, y in training.loader:
            with optimizer.attempt():
                is_last = optimizer.num_in_window == 3
                with contextlib.nullcontext() if is_last else training.model.no_sync():
                    training.loss(x, y).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
            training.note()
        training.scheduler.step()
    return training.result()


def work_between_epochs(strategy: str, nth: int, folder: str) -> dict[str, Any]:
    """A save, an evaluation that communicates, and only then what changes the learning rate."""
    training = Training(strategy, nth, 12)
    for _ in training.loader.epochs(3):
        for x, y in training.loader:
            training.step(x, y)
        if training.optimizer.has_committed:
            training.save(folder)
        if training.optimizer.has_committed:
            with training.optimizer.attempt(), torch.no_grad():
                training.model.eval()
                training.model(torch.ones(2, 3))
        training.model.train()
        training.scheduler.step()
    return training.result()


Script = Callable[[str, int, str], dict[str, Any]]
CASES: list[tuple[Script, str, int]] = [
    (accumulate_and_save, "zero2", 6),
    (leave_steps_out, "zero1", 9),
    (partial(leave_steps_out, drops_first=True), "ddp", 9),
    (leave_epochs_early, "ddp", 12),
    (accumulate_over_epochs, "zero1", 4),
    (work_between_epochs, "zero3", 9),
]


def lose(script: Script, strategy: str, folder: str, num_steps: int, num_places: int) -> None:
    def run(nth: int, elastic: Elastic | None) -> list[dict[str, Any]]:
        args = (strategy, nth, folder)
        return shoal.run(script, RANKS, "memory", args=args, timeout=40, elastic=elastic)

    expected = run(10**9, None)
    assert expected[0]["state"][0] == num_steps
    count = expected[1]["operations"]
    for nth in range(1, count + 1, max(count // num_places, 1)):
        found = run(nth, Elastic(min_ranks=RANKS, restarts=1))
        for mine, reference in zip(found, expected, strict=True):
            assert faults.same(mine["state"], reference["state"]), nth


@pytest.mark.parametrize(("script", "strategy", "num_steps"), CASES)
def test_a_lost_rank_is_replaced(
    script: Script, strategy: str, num_steps: int, tmp_path: Path
) -> None:
    lose(script, strategy, str(tmp_path), num_steps, 10)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "strategy", "num_steps"), CASES)
def test_a_lost_rank_is_replaced_everywhere(
    script: Script, strategy: str, num_steps: int, tmp_path: Path
) -> None:
    lose(script, strategy, str(tmp_path), num_steps, 1000)

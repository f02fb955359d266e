"""Ranks that are killed at chosen places of a training that goes on: for the soak test.

A victim counts the functions that it calls, from the first one of a phase on, and kills itself at
the n-th. So a fault is in the middle of a phase, whatever the machine does at the time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.elastic import Elastic

BACKENDS = ("shm", "gloo")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
NUM_STEPS, EPOCHS, SAVE_EVERY = 12, 3, 3
TIMEOUT_S = 90.0
PHASES = {
    "forward": "nn/modules/linear.py",
    "collective": "shoal/comm/",
    "optimizer": "torch/optim/adam",
    "commit": "shoal/elastic/keeper.py",
    "save": "shoal/checkpoint/saving.py",
    "join": "shoal/elastic/recovery.py",
    "recovery": "shoal/elastic/recovery.py",
}
"""Where each begins."""
_MOST_CALLS = 60


class Fault(NamedTuple):
    """One rank ends itself once.

    Attributes:
        number: Which of the run's.
        phase: See `PHASES`; that of "join" is for whoever joins.
        rank: Whose, at the time.
        step: After so many steps.
        calls: How many function calls after the phase has begun.
        by: The signal.
    """

    number: int
    phase: str
    rank: int
    step: int
    calls: int
    by: int = signal.SIGKILL


class Doom:
    """Looks at the calls of this process, and ends it at the right one."""

    def __init__(self, fault: Fault, folder: str) -> None:
        self._fault, self._place = fault, PHASES[fault.phase]
        self._mark = Path(folder, f"fault-{fault.number}")
        self._left = -1

    @property
    def is_over(self) -> bool:
        """Whether it has hit somebody."""
        return self._mark.exists()

    def lie_in_wait(self) -> None:
        """From now on."""
        sys.setprofile(self._look)

    def _look(self, frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        if self._left < 0:
            if self._place not in frame.f_code.co_filename:
                return
            self._left = self._fault.calls
        if self._left == 0:
            sys.setprofile(None)
            self._mark.touch()
            os.kill(os.getpid(), self._fault.by)
        self._left -= 1


def train(strategy: str, folder: str, faults: Sequence[Fault]) -> tuple[Any, Any, int, list[Any]]:
    """Parameters and state at the end, committed steps, and what has changed on the way."""
    membership = shoal.world().membership
    assert membership is not None
    dooms = [(fault, Doom(fault, folder)) for fault in faults]
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(48, 6)
    loader: Any = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=12, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy=strategy, elastic=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    optimizer.also.append(scheduler)
    changes: list[Any] = []
    optimizer._on_change = changes.append
    if membership.generation == 0:
        wait_for(dooms, lambda fault: fault.phase == "join")
    for _ in loader.epochs(EPOCHS):
        for x, y in loader:
            rank, step = shoal.world().rank, optimizer.num_committed

            def is_due(fault: Fault, rank: int = rank, step: int = step) -> bool:
                return fault.phase != "join" and (fault.rank, fault.step) == (rank, step)

            sys.setprofile(None)
            wait_for(dooms, is_due)
            with optimizer.attempt():
                nn.functional.mse_loss(model(x).squeeze(1), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if optimizer.has_committed and optimizer.num_committed % SAVE_EVERY == 0:
                with optimizer.attempt():
                    shoal.save(Path(folder, "saved"), model, optimizer, scheduler=scheduler,
                               sampler=loader, wait=True)  # fmt: skip
    sys.setprofile(None)
    return model.state_dict(), optimizer.state_dict(), optimizer.num_committed, changes


def wait_for(dooms: Sequence[tuple[Fault, Doom]], is_due: Any) -> None:
    """The first fault that is due, and has hit nobody."""
    for fault, doom in dooms:
        if is_due(fault) and not doom.is_over:
            doom.lie_in_wait()
            return


# Rounds ------------------------------------------------------------------------------------

_EXPECTED: dict[tuple[str, str, int], Any] = {}


def run(backend: str, strategy: str, ranks: int, faults: Sequence[Fault]) -> tuple[Any, int]:
    """The outcome of a training with these faults, and how many of them have hit."""
    elastic = Elastic(min_ranks=ranks, restarts=len(faults))
    with tempfile.TemporaryDirectory() as folder:
        found = shoal.run(
            train, ranks, backend, args=(strategy, folder, faults), timeout=TIMEOUT_S,
            elastic=elastic,
        )  # fmt: skip
        num_hit = sum(Doom(fault, folder).is_over for fault in faults)
    return found, num_hit


def draw_faults(draw: random.Random, phase: str, ranks: int) -> list[Fault]:
    """One of the phase; some phases need another one before. Sometimes a last one, later."""
    step, victim = draw.randrange(1, 6), draw.randrange(ranks)
    step += -(step + 1) % SAVE_EVERY if phase == "save" else 0  # after the step comes a save
    faults = [Fault(0, phase, victim, step, draw.randrange(_MOST_CALLS))]
    if phase in ("join", "recovery"):
        faults.append(Fault(1, "forward", (victim + 2) % ranks, step, 0))
    if draw.random() < 0.5:
        late = draw.choice(["forward", "collective", "optimizer", "commit"])
        faults.append(Fault(2, late, draw.randrange(ranks), 9, draw.randrange(_MOST_CALLS)))
    return faults


def play(draw: random.Random, phase: str, backend: str) -> list[Fault]:
    """A training with faults ends as one without, bit for bit; returns what the faults were.

    Raises:
        AssertionError: If it does not, or if a fault hit nobody.
    """
    strategy = draw.choice(STRATEGIES)
    ranks = 4 if phase == "recovery" else draw.choice([3, 4])  # two neighbours would be too much
    key = (backend, strategy, ranks)
    if key not in _EXPECTED:
        _EXPECTED[key], _ = run(*key, [])
    faults = draw_faults(draw, phase, ranks)
    found, num_hit = run(*key, faults)
    told = f"{key} with {faults}"
    assert num_hit == len(faults), f"{told}: only {num_hit} faults came"
    for rank, (mine, reference) in enumerate(zip(found, _EXPECTED[key], strict=True)):
        assert mine[2] == reference[2] == NUM_STEPS, f"{told}: rank {rank} made {mine[2]} steps"
        assert is_same(mine[:2], reference[:2]), f"{told}: rank {rank} has other values"
    return faults


def is_same(left: Any, right: Any) -> bool:
    """Whether nested values are equal bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)

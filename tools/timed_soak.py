"""How much of its pace a training keeps while ranks are lost again and again.

    python tools/timed_soak.py --seconds 300 --every 20 --backend shm

Two trainings of equally many steps: one without faults, and one in which every so many seconds one
of the ranks is killed, crashes or is stopped, and another takes its place. Both must end with the
same bits. Told is the pace of the second by that of the first, and how long each fault was felt:
the longest time without a step after it, less a usual step. That counts what a busy machine does
to the pace only where there was a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from elastic_faults import is_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.elastic import Elastic

SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP)
RANKS, WIDTH, BATCH, STEPS_PER_EPOCH = 4, 512, 64, 50
TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.005
_LATEST_S = 60.0
_ENTRY = "<qd"


class Plan(NamedTuple):
    """A training, and when ranks are lost; ``every_steps`` instead of seconds is for tests."""

    backend: str
    strategy: str
    num_steps: int
    width: int = WIDTH
    every_s: float = 0.0
    every_steps: int = 0
    seed: int = 0


class Pace(NamedTuple):
    """What came of it: the end of the training, its commits, and each fault with its time."""

    states: list[Any]
    commits: list[tuple[int, float]]
    faults: list[tuple[str, float]]

    @property
    def seconds(self) -> float:
        """From the first commit to the last."""
        return self.commits[-1][1] - self.commits[0][1]

    def felt(self) -> list[float]:
        """For each fault how much longer than usual the next commit took."""
        times = [moment for _, moment in self.commits]
        waits = list(itertools.pairwise(times))
        usual = statistics.median(after - before for before, after in waits)
        found = []
        for number, (_, begin) in enumerate(self.faults):
            end = self.faults[number + 1][1] if number + 1 < len(self.faults) else times[-1]
            # One that lasts beyond the next fault counts for that.
            own = [after - before for before, after in waits if begin < after <= end]
            found.append(max(own, default=usual) - usual)
        return found


# Ranks ------------------------------------------------------------------------------------------


def train(plan: Plan, folder: str) -> tuple[Any, Any, int]:
    """Parameters, state and committed steps at the end."""
    torch.manual_seed(0)
    width = plan.width
    model: Any = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Dropout(0.1),
                               nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))  # fmt: skip
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(STEPS_PER_EPOCH * BATCH, 64)
    data = TensorDataset(inputs, inputs[:, :3].sum(1, keepdim=True))
    loader: Any = DataLoader(data, BATCH, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy=plan.strategy, elastic=True
    )
    commits = os.open(Path(folder, "commits"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    told = 0
    for _ in loader.epochs(-(-plan.num_steps // STEPS_PER_EPOCH)):
        for x, y in loader:
            if told != optimizer.generation:
                told = optimizer.generation
                Path(folder, f"rank-{shoal.world().rank}").write_text(str(os.getpid()))
            hold(plan, folder, optimizer.num_committed)
            with optimizer.attempt():
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if optimizer.has_committed and shoal.world().rank == 0:
                os.write(commits, struct.pack(_ENTRY, optimizer.num_committed, time.monotonic()))
    os.close(commits)
    return model.state_dict(), optimizer.state_dict(), optimizer.num_committed


def hold(plan: Plan, folder: str, step: int) -> None:
    """Where faults come by steps: until this one is on its way."""
    if plan.every_steps and step and step % plan.every_steps == 0:
        mark, latest = Path(folder, f"fault-{step // plan.every_steps}"), time.monotonic()
        while not mark.exists() and time.monotonic() < latest + _LATEST_S:
            time.sleep(_LOOK_EVERY_S)


# The caller -------------------------------------------------------------------------------------


def read_commits(folder: str) -> list[tuple[int, float]]:
    """Those of the ranks that were first at the time."""
    with contextlib.suppress(FileNotFoundError):
        data = Path(folder, "commits").read_bytes()
        size = struct.calcsize(_ENTRY)
        return list(struct.iter_unpack(_ENTRY, data[: len(data) // size * size]))
    return []


class Attacker(threading.Thread):
    """Sends a signal to a random rank, again and again."""

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(daemon=True)
        self.plan, self.folder, self.is_over = plan, folder, threading.Event()
        self.faults: list[tuple[str, float]] = []
        self._draw = random.Random(plan.seed)

    def run(self) -> None:
        """Until the end of the training."""
        for number in self._moments():
            victim, fault = self._draw.randrange(RANKS), self._draw.choice(SIGNALS)
            Path(self.folder, f"fault-{number}").touch()
            self.is_over.wait(self._draw.uniform(0.0, 0.05))
            pid = int(Path(self.folder, f"rank-{victim}").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, fault)
                self.faults.append((fault.name, time.monotonic()))

    def _moments(self) -> Iterator[int]:
        number, begin = 1, 0.0
        while not self.is_over.wait(_LOOK_EVERY_S):
            commits = read_commits(self.folder) if self.plan.every_steps or not begin else []
            begin = begin or (commits[0][1] if commits else 0.0)
            if self.plan.every_steps:
                is_due = bool(commits) and commits[-1][0] >= number * self.plan.every_steps
            else:
                is_due = bool(begin) and time.monotonic() > begin + number * self.plan.every_s
            if is_due:
                yield number
                number += 1


def measure(plan: Plan) -> Pace:
    """One training."""
    has_faults = bool(plan.every_s or plan.every_steps)
    elastic = Elastic(min_ranks=RANKS, spares=int(has_faults), restarts=10_000)
    with tempfile.TemporaryDirectory() as folder:
        attacker = Attacker(plan, folder)
        if has_faults:
            attacker.start()
        try:
            states = shoal.run(
                train, RANKS, plan.backend, args=(plan, folder), timeout=TIMEOUT_S, elastic=elastic
            )
        finally:
            attacker.is_over.set()
            if has_faults:
                attacker.join()
        return Pace(states, read_commits(folder), attacker.faults)


def compare(without: Pace, with_faults: Pace) -> None:
    """Both ended with the same bits, after equally many steps.

    Raises:
        AssertionError: If they did not.
    """
    assert len(without.states) == len(with_faults.states) == RANKS, "ranks are missing at the end"
    for rank, pair in enumerate(zip(without.states, with_faults.states, strict=True)):
        assert is_same(*pair), f"rank {rank} has other values than without faults"


def main() -> int:
    """Prints both paces; 1 if the second is below the aim."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--backend", choices=["shm", "gloo"], default="shm")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--aim", type=float, default=0.8)
    options = parser.parse_args()
    plan = Plan(options.backend, options.strategy, 4 * STEPS_PER_EPOCH, seed=options.seed)
    trial = measure(plan)
    epochs = options.seconds * len(trial.commits) / trial.seconds / STEPS_PER_EPOCH
    plan = plan._replace(num_steps=max(round(epochs), 1) * STEPS_PER_EPOCH)
    print(f"{plan.strategy} over {plan.backend}, seed {plan.seed}: {plan.num_steps} steps")
    without = measure(plan)
    with_faults = measure(plan._replace(every_s=options.every))
    compare(without, with_faults)
    pace, felt = without.seconds / with_faults.seconds, with_faults.felt()
    print(f"without faults {without.seconds:.1f} s, with {len(felt)} {with_faults.seconds:.1f} s")
    for kind in sorted({name for name, _ in with_faults.faults}):
        own = [s for s, (name, _) in zip(felt, with_faults.faults, strict=True) if name == kind]
        print(
            f"{len(own):4} {kind}: felt for {statistics.median(own):.2f} s, at most {max(own):.2f}"
        )
    print(f"faults took {sum(felt) / with_faults.seconds:.1%} of the time")
    print(f"{pace:.1%} of the pace without faults, and the same bits at the end")
    return 0 if pace >= options.aim else 1


if __name__ == "__main__":
    sys.exit(main())

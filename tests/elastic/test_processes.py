"""Training that goes on when processes are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import leaks
import shoal
from shoal.elastic import Elastic
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.system.deadline import wait_until

PHASES = ("forward", "backward", "step", "between")


def train(strategy: str, victim: int | None, phase: str) -> tuple[Any, int, int]:
    """Parameters, committed steps and ranks at the end; the victim kills itself in step 3."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.1), nn.Linear(9, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(36, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader: Any = DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy=strategy, elastic=True
    )

    def die_in(here: str) -> None:
        is_due = optimizer.generation == 1 and optimizer.num_committed == 3
        if is_due and here == phase and shoal.world().rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in loader.epochs(3):
        for x, y in loader:
            with optimizer.attempt():
                output = model(x)
                die_in("forward")
                F.mse_loss(output, y).backward()
                die_in("backward")
                optimizer.step()
                die_in("step")
                optimizer.zero_grad()
            die_in("between")
    return model.state_dict(), optimizer.num_committed, shoal.world().size


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    fork_server()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("strategy", "phase"),
    [("zero3", "forward"), ("ddp", "backward"), ("zero2", "step"), ("zero1", "between")],
)
def test_a_killed_rank_is_replaced(backend: str, strategy: str, phase: str) -> None:
    leaks.baseline()
    expected = shoal.run(train, 3, backend, args=(strategy, None, ""), elastic=Elastic())
    elastic = Elastic(min_ranks=3, restarts=1)
    found = shoal.run(train, 3, backend, args=(strategy, 1, phase), elastic=elastic)
    assert [rest for _, *rest in found] == [rest for _, *rest in expected] == [[9, 3]] * 3
    for (state, *_), (wanted, *_) in zip(found, expected, strict=True):
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on(backend: str, victim: int) -> None:
    leaks.baseline()
    found = shoal.run(
        train, 3, backend, args=("zero3", victim, "backward"), elastic=Elastic(min_ranks=2)
    )
    assert [rest for _, *rest in found] == [[9, 2]] * 2
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


def train_replicas(
    victim: int | None, epochs: int, alone: str | None = None
) -> tuple[Any, int, int, list[Any]]:
    """Two ranks hold one model between them; a victim kills itself in the fourth step.

    ``alone``: a file that is made where one replica is left. It makes a step and then waits for the
    others; who takes the victim's place waits for the file.
    """
    membership = shoal.world().membership
    if alone is not None and membership is not None and membership.generation == 0:
        assert wait_until(Path(alone).exists, 60.0, 0.01)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.1), nn.Linear(9, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(36, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader: Any = DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="hybrid", tensor=2, zero=1, elastic=True
    )
    changes: list[Any] = []
    optimizer._on_change = changes.append

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_due = optimizer.generation == 1 and optimizer.num_committed == 3
        if is_due and shoal.world().rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(output, targets)

    for _ in loader.epochs(epochs):
        for x, y in loader:
            with optimizer.attempt():
                model.train_step(x, y, loss_fn)
                optimizer.step()
                optimizer.zero_grad()
            if alone is not None and shoal.world().size == 2:
                Path(alone).touch()
                membership = shoal.world().membership
                assert membership is not None
                assert wait_until(membership.wants_change, 60.0, 0.01)
    return model.state_dict(), optimizer.num_committed, shoal.world().size, changes


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_killed_rank_of_a_replica_is_replaced(backend: str) -> None:
    leaks.baseline()
    expected = shoal.run(train_replicas, 4, backend, args=(None, 2), elastic=Elastic())
    elastic = Elastic(min_ranks=4, restarts=1)
    found = shoal.run(train_replicas, 4, backend, args=(1, 2), elastic=elastic)
    assert [each[1:3] for each in found] == [each[1:3] for each in expected] == [(6, 4)] * 4
    for (state, *_), (wanted, *_) in zip(found, expected, strict=True):
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_the_rest_of_a_replica_waits_and_comes_back(tmp_path: Path) -> None:
    """With whoever takes the place of the lost one, as soon as that one is there."""
    leaks.baseline()
    args = (1, 4, str(tmp_path / "alone"))
    found = shoal.run(train_replicas, 4, "shm", args=args, elastic=Elastic(restarts=1))
    assert [each[1:3] for each in found] == [(12, 4)] * 4
    less, more = found[0][3]
    assert (less.old_size, less.new_size, set(less.left)) == (4, 2, {0, 1})
    assert (more.old_size, more.new_size, more.left) == (2, 4, ())
    assert all(torch.equal(found[0][0][name], each[0][name]) for each in found for name in each[0])


def test_the_others_go_on_without_the_replica() -> None:
    leaks.baseline()
    found = shoal.run(train_replicas, 4, "gloo", args=(2, 2), elastic=Elastic())
    assert [each[1:3] for each in found] == [(6, 2)] * 2
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


def train_while_one_stops(folder: str) -> tuple[int, list[Any]]:
    """Rank 1 stops itself in the fourth step; when the others went on, and why it was gone."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(24, 4)
    loader: Any = DataLoader(TensorDataset(inputs, inputs[:, :3]), batch_size=6)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="zero3", elastic=True
    )
    changes: list[Any] = []
    optimizer._on_change = lambda change: changes.append((time.monotonic(), change))
    for _ in loader.epochs(2):
        for x, y in loader:
            with optimizer.attempt():
                loss = F.mse_loss(model(x), y)
                if (shoal.world().rank, optimizer.num_committed, optimizer.generation) == (1, 3, 1):
                    Path(folder, "stopped").write_text(f"{time.monotonic()} {os.getpid()}")
                    os.kill(os.getpid(), signal.SIGSTOP)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return optimizer.num_committed, changes


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_stopped_rank_is_named_and_never_comes_back(backend: str, tmp_path: Path) -> None:
    """It is killed before the others go on, so there is nothing that SIGCONT could wake."""
    leaks.baseline()
    found = shoal.run(
        train_while_one_stops, 3, backend, args=(str(tmp_path),), elastic=Elastic(min_ranks=2)
    )
    begin, pid = (tmp_path / "stopped").read_text().split()
    assert [num_committed for num_committed, _ in found] == [8, 8]
    for _, changes in found:
        ((went_on, change),) = changes
        assert change.left == (1,)
        assert "was stopped (SIGSTOP)" in change.reasons[1]
        assert went_on - float(begin) < 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), signal.SIGCONT)

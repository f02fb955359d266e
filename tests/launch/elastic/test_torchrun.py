"""Under torchrun an elastic script trains, but in a world whose ranks do not change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.joining.test_started_by import environment, free_port

DEADLINE_S = 150

# Saves after each epoch, and is killed in the middle of the third, when it is run for the first
# time.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import shoal

with shoal.init(timeout=60) as world:
    folder, is_disturbed = sys.argv[1], sys.argv[2] == "disturbed"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(36, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="zero3", elastic=True
    )
    begin = 0
    if Path(folder, "LATEST").exists():
        begin = shoal.load(folder, model, optimizer, sampler=loader).step
    for epoch in loader.epochs(4):
        for x, y in loader:
            with optimizer.attempt():
                model.train_step(x, y, F.mse_loss)
                if is_disturbed and begin == 0 and epoch == 2 and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
        shoal.save(folder, model, optimizer, step=epoch + 1, sampler=loader)
    total = sum(float(each.double().sum()) for each in model.state_dict().values())
    if world.rank == 0:
        print("RESULT", begin, world.size, total, flush=True)
"""


@pytest.fixture
def train(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def train(name: str, max_restarts: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", str(free_port()), "--max-restarts", str(max_restarts)]
        command += [str(script), str(tmp_path / name), name]
        return subprocess.run(
            command,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    return train


def result(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return line.split()[1:]


def test_a_lost_rank_ends_all_and_torchruns_restart_begins_at_the_newest_checkpoint(train) -> None:
    done = train("disturbed", 1)
    begin, size, total = result(done)
    assert (begin, size) == ("2", "2")
    assert "MembershipChanged" not in done.stderr
    assert result(train("undisturbed", 0)) == ["0", "2", total]

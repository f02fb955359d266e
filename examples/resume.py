"""Training that is killed and goes on, with another strategy and another number of ranks.

shoal launch -n 4 examples/resume.py run --strategy zero3 --die-at 30     saves, and is killed
shoal launch -n 2 examples/resume.py run --strategy ddp                   goes on where it was
python examples/resume.py run                                             so does one process
shoal inspect run --verify
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

BATCH, EPOCHS, SAVE_EVERY = 48, 4, 5


def make_data() -> TensorDataset:
    """Points in the plane, and how far from the origin they are."""
    points = torch.randn(480, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points.norm(dim=1, keepdim=True))


def train(folder: str, strategy: str, die_at: int | None = None) -> tuple[int, float]:
    """Returns the step that it began with, and the last loss."""
    torch.manual_seed(0)
    data = make_data()
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    sampler = shoal.sampler(data, BATCH, seed=1)
    goes_along = {"scheduler": scheduler, "sampler": sampler}

    step, loss = 0, torch.zeros(())
    if Path(folder, "LATEST").exists():
        step = shoal.load(folder, model, optimizer, **goes_along).step
    begin = step
    while step < EPOCHS * len(sampler):
        for points, distances in DataLoader(data, batch_sampler=sampler):
            loss = model.train_step(points, distances, F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % SAVE_EVERY == 0:
                # Written in the background; the next call waits for it.
                shoal.save(folder, model, optimizer, step=step, keep=2, wait=False, **goes_along)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    shoal.save(folder, model, optimizer, step=step, keep=2, **goes_along)
    return begin, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where checkpoints are")
    parser.add_argument("--strategy", default="ddp", help="ddp, zero1, zero2, zero3, fsdp")
    parser.add_argument("--die-at", type=int, help="the step after which all ranks are killed")
    arguments = parser.parse_args()
    with shoal.init(timeout=60) as world:
        begin, loss = train(arguments.folder, arguments.strategy, arguments.die_at)
        if world.rank == 0:
            print(f"from step {begin} on {world.size} ranks: loss {loss:.6f}")


if __name__ == "__main__":
    main()

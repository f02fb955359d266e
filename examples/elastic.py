"""Training that goes on when ranks are killed, and ends as if nothing had been.

shoal launch --elastic -n 3 --min 3 --spares 1 examples/elastic.py               undisturbed
shoal launch --elastic -n 3 --min 3 --spares 1 examples/elastic.py --kill 1@20   the same loss
shoal launch --elastic -n 3 --min 2 examples/elastic.py --kill 1@20              with two ranks
python examples/elastic.py                                                       alone

While it runs, others can join from another terminal, by the line that the launcher prints.
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

EPOCHS, BATCH = 10, 48


def make_data() -> TensorDataset:
    """Points in the plane, and how far from the origin they are."""
    points = torch.randn(480, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points.norm(dim=1, keepdim=True))


def train(strategy: str, victim: int | None = None, at_step: int = 0) -> float:
    """Returns the loss over all data; the victim kills itself in the middle of a step."""
    torch.manual_seed(0)
    data = make_data()
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy=strategy, elastic=True
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    optimizer.also.append(scheduler)  # it goes back with a step that is void

    for _ in loader.epochs(EPOCHS):
        for points, distances in loader:
            with optimizer.attempt():
                model.train_step(points, distances, F.mse_loss)
                is_due = optimizer.generation == 1 and optimizer.num_committed == at_step
                if is_due and shoal.world().rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    model.eval()
    with torch.no_grad():
        points, distances = data.tensors
        return F.mse_loss(model(points), distances).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="zero3", help="ddp, zero1, zero2, zero3, fsdp")
    parser.add_argument("--kill", default="", help="RANK@STEP: which rank dies, and when")
    arguments = parser.parse_args()
    victim, _, step = arguments.kill.partition("@")
    with shoal.init(timeout=60) as world:
        loss = train(arguments.strategy, int(victim) if victim else None, int(step or 0))
        if world.rank == 0:
            print(f"on {world.size} ranks: loss {loss!r}")


if __name__ == "__main__":
    main()

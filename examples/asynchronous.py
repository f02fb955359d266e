"""No barriers: a rank that is slow does not slow the others down.

shoal launch -n 3 examples/asynchronous.py
shoal launch -n 3 examples/asynchronous.py --slow 0.05 --when-stale damp
shoal launch -n 4 examples/asynchronous.py --topology gossip
"""

import argparse
import time
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import shoal


def make_data() -> TensorDataset:
    """Points in the plane; inside of a ring or not."""
    points = torch.randn(960, 2, generator=torch.Generator().manual_seed(0))
    inside = (points.norm(dim=1) > 0.8) & (points.norm(dim=1) < 1.6)
    return TensorDataset(points, inside.float())


def train(topology: str = "server", epochs: int = 20, slow: float = 0.0, **options) -> tuple:
    """Returns the loss of the trained model, and how stale this rank's updates were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(make_data(), 96)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="async", topology=topology, **options
    )
    for _ in range(epochs):
        for points, inside in loader:
            loss = F.binary_cross_entropy_with_logits(model(points), inside)
            time.sleep(slow if shoal.world().rank == 0 else 0.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.average()  # all ranks are here: none leaves while others still train
    points, inside = make_data().tensors
    with model.predicting():
        loss = F.binary_cross_entropy_with_logits(model(points), inside)
    return loss.item(), Counter(optimizer.staleness)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", default="server", help="server or gossip")
    parser.add_argument("--when-stale", default="drop", help="drop, damp or wait")
    parser.add_argument("--max-staleness", type=int, default=8)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that rank 0 sleeps a step")
    options = vars(parser.parse_args())
    with shoal.init(timeout=60) as world:
        loss, staleness = train(**options)
        counts = dict(sorted(staleness.items()))
        print(f"rank {world.rank}: loss {loss:.3f}, updates by staleness {counts}")


if __name__ == "__main__":
    main()

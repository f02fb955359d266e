"""Ranks that meet rarely: each trains by itself, and parameters are averaged now and then.

shoal launch -n 2 examples/local.py
shoal launch -n 4 examples/local.py --every 50 --diloco
shoal launch -n 2 examples/local.py --compression int8
shoal verify examples/local.py:build -n 4 --strategy local
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

import shoal


def make_data() -> TensorDataset:
    """Points in the plane; inside of a ring or not."""
    points = torch.randn(960, 2, generator=torch.Generator().manual_seed(0))
    inside = (points.norm(dim=1) > 0.8) & (points.norm(dim=1) < 1.6)
    return TensorDataset(points, inside.float())


def build() -> tuple:
    """For `shoal.verify`: what to train, on global batches."""
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = AdamW(model.parameters(), lr=3e-2)
    return model, optimizer, DataLoader(make_data(), 96), F.binary_cross_entropy_with_logits


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What DiLoCo steps with, once in a round."""
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(every: int = 10, epochs: int = 15, *, is_diloco: bool = False, **options) -> float:
    """Returns the loss of the averaged model."""
    torch.manual_seed(0)
    model, optimizer, loader, loss_fn = build()
    outer = nesterov if is_diloco else None
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="local", every=every, outer=outer, **options
    )
    if shoal.world().rank == 0:
        print(model.describe())
    for _ in range(epochs):
        for points, inside in loader:
            loss_fn(model(points), inside).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.average()  # the last round may not be complete
    points, inside = make_data().tensors
    with model.predicting():
        return loss_fn(model(points), inside).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=10, help="steps between two averages")
    parser.add_argument("--diloco", action="store_true", help="momentum over the averages")
    parser.add_argument("--compression", help="of what is averaged, such as int8")
    given = parser.parse_args()
    with shoal.init(timeout=60) as world:
        loss = train(given.every, is_diloco=given.diloco, compression=given.compression)
        if world.rank == 0:
            print(f"loss {loss:.3f}")


if __name__ == "__main__":
    main()

"""Layers spread over ranks: a small network in two or more stages, batches in micro-batches.

shoal launch -n 2 examples/pipeline.py
shoal launch -n 4 examples/pipeline.py --data 2 --schedule zero-bubble
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.strategies.pipeline import draw


class Network(nn.Module):
    """Blocks with a skip from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number for each row."""
        x = begin = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(torch.cat([x, begin], -1)).squeeze(-1)


def train(schedule: str = "1f1b", data: int = 1, steps: int = 30) -> float:
    torch.manual_seed(0)
    module = Network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy="pipeline", schedule=schedule, data=data, micro_batches=8
    )
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    batches = shoal.sampler(256, 64, world=model.data_group)
    for _ in range(-(-steps // len(batches))):
        for rows in batches:
            x = points[rows]
            optimizer.zero_grad()
            loss = model.train_step(x, x.norm(dim=1), F.mse_loss)
            optimizer.step()
    trace = model.gather_trace()
    if shoal.world().rank == 0:
        print(model.describe())
        stages = model.pipeline.stage.group.size
        print(draw(schedule, stages, 8, trace=trace).heading)
        print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--data", type=int, default=1)
    options = parser.parse_args()
    with shoal.init():
        train(options.schedule, options.data)

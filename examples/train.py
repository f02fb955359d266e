"""Training under any strategy: one line makes a plain script distributed.

shoal launch -n 2 examples/train.py --strategy zero3
shoal launch -n 4 examples/train.py --strategy ddp --plain
shoal launch -n 4 examples/train.py --strategy fsdp --replica 2 --mixed-precision bf16
python examples/train.py                       a world of one: the same code
shoal verify examples/train.py:build -n 4      is it equal to one process?
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal


def make_data() -> TensorDataset:
    """Points in the plane; inside of a ring or not."""
    points = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    inside = (points.norm(dim=1) > 0.8) & (points.norm(dim=1) < 1.6)
    return TensorDataset(points, inside.float())


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0)
    )


def build() -> tuple:
    """For `shoal.verify`: what to train, on global batches."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(make_data(), 60), F.binary_cross_entropy_with_logits


def train(strategy: str, *, is_plain: bool = False, epochs: int = 10, **options) -> float:
    """Returns the share of points that the model gets right.

    ``options`` go to `as_distributed`: ``mixed_precision="bf16"``, ``replica=2``, ...
    """
    torch.manual_seed(0)
    data, model = make_data(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy, **options)

    world = shoal.world()
    # Batches of 60 for all ranks together: each rank gets its part.
    loader = DataLoader(data, batch_sampler=shoal.sampler(data, batch_size=60))
    for epoch in range(epochs):
        for points, inside in loader:
            if is_plain:
                # The loop you have. Every rank counts the same, whatever its number of rows.
                loss = F.binary_cross_entropy_with_logits(model(points), inside)
                loss.backward()
            else:
                # Works under every strategy, and rows count the same, whatever rank they are on.
                loss = model.train_step(points, inside, F.binary_cross_entropy_with_logits)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        mean = world.agree(loss.detach())
        if world.rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
        if world.agree(mean < 0.05):  # all ranks stop, or none
            break
    with model.predicting():
        right = (model(data.tensors[0]) > 0) == data.tensors[1].bool()
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto", help="ddp, zero1, zero2, zero3, fsdp, auto")
    parser.add_argument("--plain", action="store_true", help="the plain loop, without train_step")
    parser.add_argument("--mixed-precision", choices=["bf16", "fp16"], help="compute with 16 bits")
    parser.add_argument("--replica", type=int, default=1, help="hybrid sharding: groups of ranks")
    arguments = parser.parse_args()
    options = {"mixed_precision": arguments.mixed_precision, "replica": arguments.replica}
    with shoal.init(timeout=60) as world:
        right = train(arguments.strategy, is_plain=arguments.plain, **options)
        if world.rank == 0:
            print(f"{100 * right:.0f} % right on {world.size} ranks over {world.backend.name}")


if __name__ == "__main__":
    main()

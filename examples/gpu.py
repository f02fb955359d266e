"""Training on GPUs: the plain loop, bf16, clipping, one rank for each GPU.

shoal launch -n 8 examples/gpu.py
python examples/gpu.py                         a world of one, on a GPU or without one
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def train(steps: int = 20, width: int = 256) -> float:
    """Returns the last loss, the mean over the ranks."""
    world = shoal.world()
    device = world.backend.device  # this rank's GPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(64 * steps, 32)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=64)

    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="fsdp", mixed_precision="bf16"
    )
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return world.agree(loss.detach())


def main() -> None:
    with shoal.init(timeout=60) as world:
        loss = train()
        if world.rank == 0:
            print(f"loss {loss:.4f} on {world.size} ranks over {world.backend.name}")


if __name__ == "__main__":
    main()

"""Activations dropped in forward and got back in backward, from this rank or another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shoal
from pools import Team
from shoal.activations import DistributedCheckpointManager

NUM_BLOCKS, WIDTH = 4, 16


class Borrowed(torch.autograd.Function):
    """A block that keeps nothing: its input is on another rank, and comes back for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, block: nn.Module, fetch) -> Tensor:
        ctx.block, ctx.fetch = block, fetch
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        with torch.enable_grad():
            x = ctx.fetch().detach().requires_grad_(True)
            output = ctx.block(x)
        output.backward(gradient)
        return x.grad, None, None


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    return nn.Sequential(*(block() for _ in range(NUM_BLOCKS)))


def train_with_borrowed_inputs() -> object:
    """The inputs of all blocks lie on the next rank while this one goes on."""
    world = shoal.world()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1 + world.rank))
    plain = make_model()
    plain(x).sum().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    holder, guest = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    model, activation = make_model(), x.clone().requires_grad_(True)
    with DistributedCheckpointManager() as manager:
        for index, block in enumerate(model):
            key = f"{world.rank}: {index}"
            sent = world.backend.send(activation.detach(), holder, async_op=True)
            kept = world.backend.recv(src=guest)
            sent.wait()
            manager.register_checkpoint(f"{guest}: {index}", kept)
            activation = Borrowed.apply(
                activation, block, lambda key=key: manager.retrieve_or_fetch(key, holder)
            )
        world.barrier()
        held = manager.get_aggregated_memory_stats()
        activation.sum().backward()
        world.barrier()
    same = [
        torch.equal(parameter.grad, each)
        for parameter, each in zip(model.parameters(), expected, strict=True)
    ]
    return same, held.per_rank_memory_used, held.per_rank_checkpoint_count


def test_gradients_are_unchanged(several: Team) -> None:
    for same, used, counts in several.run(train_with_borrowed_inputs):
        assert all(same)
        assert used == (NUM_BLOCKS * 8 * WIDTH * 4,) * several.size
        assert counts == (NUM_BLOCKS,) * several.size

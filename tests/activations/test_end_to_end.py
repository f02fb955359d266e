"""Activations dropped in forward and got back in backward, from this rank or another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shoal
from pools import Team
from shoal.activations import DistributedCheckpointManager, PipelineParallelCheckpointManager

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


def make_model(num_blocks: int = NUM_BLOCKS) -> nn.Sequential:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    return nn.Sequential(*(block() for _ in range(num_blocks)))


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


def train_in_stages() -> object:
    """Every rank has one block; what goes between them, forth and back, is fetched by its name."""
    world = shoal.world()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    stage, last = world.rank, world.size - 1
    whole = make_model(world.size)
    whole(x).sum().backward()
    expected = [parameter.grad for parameter in whole[stage].parameters()]
    block = make_model(world.size)[stage]
    with (
        DistributedCheckpointManager() as manager,
        PipelineParallelCheckpointManager(manager, world.size, stage) as own,
    ):
        for turn in range(world.size):  # forward, which keeps nothing but the boundaries
            if turn == stage:
                given = own.retrieve_stage_checkpoint(f"out {stage - 1}") if stage else x
                with torch.no_grad():
                    own.register_stage_checkpoint(f"out {stage}", block(given), is_boundary=True)
            world.barrier()
        for turn in reversed(range(world.size)):
            if turn == stage:
                given = own.retrieve_stage_checkpoint(f"out {stage - 1}") if stage else x
                given = given.clone().requires_grad_()
                output = block(given)
                gradient = torch.ones_like(output)
                if stage < last:
                    assert f"gradient {stage + 1}" in own.get_next_stage_boundaries()
                    gradient = own.retrieve_stage_checkpoint(f"gradient {stage + 1}")
                output.backward(gradient)
                own.register_stage_checkpoint(f"gradient {stage}", given.grad, is_boundary=True)
            world.barrier()
        count = manager.get_aggregated_memory_stats().total_checkpoint_count
    pairs = zip(block.parameters(), expected, strict=True)
    return all(torch.allclose(parameter.grad, each) for parameter, each in pairs), count


def test_a_pipeline(several: Team) -> None:
    assert several.run(train_in_stages) == [(True, 2 * several.size)] * several.size

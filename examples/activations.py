"""The inputs of a rank's blocks lie on its neighbour until backward needs them.

Run it: `python examples/activations.py`
"""

import torch
from torch import Tensor, nn

import shoal
from shoal.activations import DistributedCheckpointManager

NUM_BLOCKS, WIDTH = 4, 64


class Borrowed(torch.autograd.Function):
    """A block that keeps nothing: backward fetches its input and computes the block again."""

    @staticmethod
    def forward(ctx, x: Tensor, block: nn.Module, fetch) -> Tensor:
        """Computes without a graph."""
        ctx.block, ctx.fetch = block, fetch
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """Computes again, now with a graph."""
        with torch.enable_grad():
            x = ctx.fetch().requires_grad_(True)
            output = ctx.block(x)
        output.backward(gradient)
        return x.grad, None, None


def train() -> tuple[float, int]:
    world = shoal.world()
    holder, guest = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)]
    x = torch.randn(32, WIDTH).requires_grad_(True)
    with DistributedCheckpointManager() as manager:
        for index, block in enumerate(blocks):
            sent = world.backend.send(x.detach(), holder, async_op=True)
            manager.register_checkpoint(f"{guest}/{index}", world.backend.recv(src=guest))
            sent.wait()
            name = f"{world.rank}/{index}"
            x = Borrowed.apply(x, block, lambda name=name: manager.retrieve_or_fetch(name, holder))
        stats = manager.get_aggregated_memory_stats()
        if world.rank == 0:
            print(stats)
        for index in reversed(range(NUM_BLOCKS)):  # while backward computes, the next is fetched
            manager.prefetch(f"{world.rank}/{index}", holder)
        x.square().mean().backward()
        world.barrier()  # nobody fetches any more
    total = sum(p.grad.square().sum() for block in blocks for p in block.parameters())
    return float(total), stats.total_checkpoint_count


if __name__ == "__main__":
    print(shoal.run(train, ranks=2, backend="shm"))

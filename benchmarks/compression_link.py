"""torch's own DDP for `compression.py`, alone and with its PowerSGD hook."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, Shape
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def torch_steps(contender: str, shape: Shape, steps: int) -> tuple[int, list[float]]:
    """This rank, and the seconds of each step; ranks and addresses are in the environment."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # With several buckets the hook's second all-reduces are begun in any order, and Gloo, which
    # pairs them by order, ends the process ("Received data size doesn't match expected size").
    bucket_cap_mb = 1000 if "powersgd" in contender else None
    model = DistributedDataParallel(GPT(shape), bucket_cap_mb=bucket_cap_mb)
    _, _, number = contender.rpartition("powersgd:")
    if "powersgd" in contender:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(number), start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for step in range(steps + 3):
        generator = torch.Generator().manual_seed(step * 100 + rank)
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.length + 1), generator=generator)
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return rank, times[3:]  # the hook begins at the third

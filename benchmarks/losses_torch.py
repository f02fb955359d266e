"""Where the loss of `losses.py` ends with torch's DDP and its PowerSGD hook, over Gloo.

    python benchmarks/losses_torch.py text --rate 0.4 --steps 1200

Same batches, models, seeds, rates and uncompressed steps as `losses.py text compression`, so that
the losses can be compared with those of `powersgd:2` one by one.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
from losses import TASKS, unseen_loss
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

RANKS = 2


def learn(rank: int, name: str, rate: float, seed: int, steps: int, matrix_rank: int) -> None:
    """Prints the loss on rows that no step has seen; no hook if ``matrix_rank`` is 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    task, warm_up = TASKS[name], steps // 10
    torch.manual_seed(seed)
    module = task.make()
    optimizer = task.optimizer(module.parameters(), lr=rate)
    model = nn.parallel.DistributedDataParallel(module)
    if matrix_rank:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_rank, start_powerSGD_iter=warm_up, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    generator = torch.Generator().manual_seed(10**6 + seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm_up, 1 - step / steps)
        inputs, targets = (rows.chunk(RANKS)[rank] for rows in task.batch(generator))
        task.loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        loss = unseen_loss(task, module)
        print(f"{name}, {steps} steps, rate {rate}, seed {seed}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--matrix-rank", type=int, default=2, help="0 for no hook")
    given = parser.parse_args()
    for seed in range(1, given.seeds + 1):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        args = (given.task, given.rate, seed, given.steps, given.matrix_rank)
        multiprocessing.spawn(learn, args, nprocs=RANKS)


if __name__ == "__main__":
    main()

"""What ranks can do together, in a script.

shoal launch -n 2 examples/collectives.py     two ranks
torchrun --nproc-per-node 2 examples/collectives.py
mpiexec -n 2 python examples/collectives.py
python examples/collectives.py                 a world of one: the same code, nobody to wait for
"""

import torch

import shoal


def talk(world: shoal.comm.World) -> dict[str, object]:
    """The same operations in the same order on every rank."""
    rank, size = world.rank, world.size
    results: dict[str, object] = {}

    # Operations whose result has the shape of the input work in place.
    gradient = torch.full((3,), float(rank))
    world.all_reduce(gradient, "average")
    results["average"] = gradient.tolist()

    settings = torch.tensor([7, 8, 9]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    world.broadcast(settings, root=0)
    results["settings"] = settings.tolist()

    # The others return a new tensor. Ranks may give different numbers of rows.
    mine = torch.full((rank + 1,), rank)
    results["everybody's rows"] = world.all_gather(mine).tolist()

    # 5 rows do not divide by 2 ranks: the first ranks get one more.
    results["my rows of the sum"] = world.reduce_scatter(torch.arange(5)).tolist()

    # Communication and computation at the same time.
    work = world.all_reduce(torch.ones(1000), async_op=True)
    computed = torch.randn(64, 64).matmul(torch.randn(64, 64))
    results["asynchronous"] = [work.wait().sum().item(), list(computed.shape)]

    # Plain data and tensors travel as objects.
    results["names"] = world.all_gather_object({"rank": rank, "host": "this one"})

    # A message around the ring. A send ends when it was received, so it must not block here.
    if size > 1:
        sending = world.send(torch.tensor([rank]), (rank + 1) % size, tag=1, async_op=True)
        results["from the rank before"] = world.recv(src=(rank - 1) % size, tag=1).item()
        sending.wait()
    return results


def main() -> None:
    with shoal.init(timeout=60) as world:
        results = talk(world)
        for rank in range(world.size):  # one after the other, so that the output is in order
            world.barrier()
            if rank == world.rank:
                print(f"rank {rank} of {world.size} over {world.backend.name}:")
                for name, value in results.items():
                    print(f"  {name}: {value}")


if __name__ == "__main__":
    main()

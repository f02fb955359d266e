"""Groups of ranks: a mesh of two axes, and a split of your own.

shoal launch -n 4 examples/groups.py
"""

import torch

import shoal
from shoal.comm import Mesh


def talk(world: shoal.comm.World) -> dict[str, object]:
    """With 4 ranks: tensor pairs (0, 1) and (2, 3), data pairs (0, 2) and (1, 3)."""
    # data=None takes what the other axes leave.
    mesh = Mesh(tensor=2 if world.size % 2 == 0 else 1)
    tensor, data = mesh.group("tensor"), mesh.group("data")

    # Each group has every collective. Sum parts of a layer in one, average over data in the other.
    value = torch.tensor([float(world.rank)])
    tensor.all_reduce(value)
    data.all_reduce(value, "average")

    # A group of your own: ranks of one color, or none.
    evens = world.split(0 if world.rank % 2 == 0 else None)
    members = evens.all_gather_object(world.rank) if evens is not None else []

    return {
        "place": {axis: mesh.coordinates[axis] for axis in ("data", "tensor")},
        "tensor group": tensor.ranks,
        "data group": data.ranks,
        "value": value.item(),
        "even ranks": members,
    }


def main() -> None:
    with shoal.init(timeout=60) as world:
        print(f"rank {world.rank}: {talk(world)}")


if __name__ == "__main__":
    main()

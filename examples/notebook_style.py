"""Ranks from a function, as in a notebook: no launcher, no file, closures welcome.

python examples/notebook_style.py            threads that take turns
python examples/notebook_style.py shm        processes
"""

import sys

import torch

import shoal


def main(backend: str = "memory") -> list[torch.Tensor]:
    data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0], [2.0, 0.0], [0.0, 2.0]])
    target = data @ torch.tensor([2.0, -1.0])

    def fit(rate: float) -> torch.Tensor:
        """Gradient descent on this rank's rows; `data` and `target` come from outside."""
        world = shoal.world()
        rows = slice(world.rank, None, world.size)
        weight = torch.zeros(2, requires_grad=True)
        for _ in range(50):
            loss = (data[rows] @ weight - target[rows]).square().sum() / len(data)
            (gradient,) = torch.autograd.grad(loss, weight)
            world.all_reduce(gradient)  # the sum of the ranks' shares is the whole gradient
            weight.data -= rate * gradient
        return weight.detach()

    # Results come back by rank; an exception on any rank is raised here, with the rank named.
    weights = shoal.run(fit, ranks=3, backend=backend, args=(0.1,), timeout=60)
    print(f"{backend}: {weights[0].tolist()} on each of {len(weights)} ranks")
    return weights


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""How much is gathered ahead of what is in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies.engine.flat_group import ABSENT

LAYERS, WIDTH = 6, 16
GROUP_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def most_ahead(prefetch_bytes: int) -> tuple[list[int], torch.Tensor]:
    """How many groups are here or on their way behind each layer's, in forward and in backward."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    options: dict[str, Any] = {"min_group_bytes": 0, "prefetch_bytes": prefetch_bytes}
    model = shoal.as_distributed(plain, strategy="zero3", **options)
    gathering, counts = model.engine.gathering, []
    for number, layer in enumerate(plain):

        def count(*_: object, number: int = number) -> None:
            states = [group.state is not ABSENT for group in gathering._groups.values()]
            counts.append(sum(states[number + 1 :]))

        layer.register_forward_hook(count)
    for _ in range(2):
        counts.clear()
        output = model(torch.ones(2, WIDTH))
        output.sum().backward()
    return counts, output.detach()


@pytest.mark.parametrize(
    ("prefetch_bytes", "most"), [(0, 0), (1, 1), (2 * GROUP_BYTES, 2), (1 << 30, LAYERS)]
)
def test_as_many_groups_are_gathered_ahead_as_have_so_many_bytes(
    prefetch_bytes: int, most: int
) -> None:
    default = shoal.run(most_ahead, 2, "memory", args=(1,))[0][1]
    for counts, output in shoal.run(most_ahead, 2, "memory", args=(prefetch_bytes,)):
        assert counts == [min(most, LAYERS - 1 - number) for number in range(LAYERS)]
        assert torch.equal(output, default)

"""What the last stage returns, given to every rank of the pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.comm import Backend
from shoal.strategies.pipeline.learning.unit_results import example_of, structure_of


def spread(output: Any, group: Backend, *, is_here: bool) -> Any:
    """The last stage's output on every rank; ``is_here`` on the rank that has it."""
    root = group.size - 1
    if not is_here:
        leaves, example = group.broadcast_object(root=root)
        structure = structure_of(example)
    else:
        found, structure = tree_flatten(output)
        leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in found]
        group.broadcast_object((leaves, example_of(structure, found)), root=root)
    values = []
    for number, leaf in enumerate(leaves):
        if leaf is not None:
            values.append(leaf[0])
            continue
        own = found[number].detach().clone() if is_here else None
        values.append(group.broadcast(own, root=root))
    return tree_unflatten(values, structure)

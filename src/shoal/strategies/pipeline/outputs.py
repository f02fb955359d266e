"""What the last stage returns, given to every rank of the pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.comm import Backend


def spread(output: Any, group: Backend, *, is_here: bool) -> Any:
    """The last stage's output on every rank; ``is_here`` on the rank that has it."""
    root = group.size - 1
    if not is_here:
        leaves, spec = group.broadcast_object(root=root)
    else:
        found, tree = tree_flatten(output)
        spec = tree_unflatten(list(range(len(found))), tree)
        leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in found]
        group.broadcast_object((leaves, spec), root=root)
    numbers, tree = tree_flatten(spec)
    values = []
    for number in numbers:
        if leaves[number] is not None:
            values.append(leaves[number][0])
            continue
        own = found[number].detach().clone() if is_here else None
        values.append(group.broadcast(own, root=root))
    return tree_unflatten(values, tree)

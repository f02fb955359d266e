"""The structure of a tree of values, as something to send.

Numbers take the places of the leaves, so that trees of tuples, lists and dicts need no pickle. A
class that looks at what it is made of, as `PackedSequence` does, gets its own leaves instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shoal.errors import ShoalError


def example_of(structure: TreeSpec, leaves: Sequence[Any]) -> Any:
    """A tree of this structure, as small as can be; ``leaves`` are what it has in truth.

    Example:
        >>> leaves, structure = tree_flatten({"a": torch.zeros(9), "b": [None]})
        >>> example_of(structure, leaves)
        {'a': 0, 'b': [1]}
    """
    try:
        return tree_unflatten(list(range(len(leaves))), structure)
    except Exception:  # whatever its class raises
        return tree_unflatten([_sendable(leaf) for leaf in leaves], structure)


def structure_of(example: Any) -> TreeSpec:
    """The inverse."""
    structure: TreeSpec = tree_flatten(example)[1]
    return structure


def check_known(unit: str, leaves: Sequence[Any]) -> None:
    """Refuses a dataclass of tensors that torch takes for a single value: none of them would go."""
    for leaf in leaves:
        is_open = is_dataclass(leaf) and not isinstance(leaf, type)
        if is_open and any(isinstance(value, Tensor) for value in tree_leaves(_fields(leaf))):
            kind = type(leaf).__name__
            raise ShoalError(
                f"{unit} returns a {kind}, and torch does not know that there are tensors in it: "
                f"call torch.utils._pytree.register_dataclass({kind}) before the model is wrapped, "
                "or return a tuple, a named tuple or a dict"
            )


def _fields(value: Any) -> list[Any]:
    return [getattr(value, field.name, None) for field in fields(value)]


def _sendable(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

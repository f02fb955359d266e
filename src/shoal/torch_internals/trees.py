"""Nested lists, tuples and dicts of values, as torch walks through them."""

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "tree_unflatten",
]

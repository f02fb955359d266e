"""Nested values."""

from __future__ import annotations

from needs import needs
from shoal.torch_internals import trees

NESTED = {"b": [1, (2, None)], "a": 3}


def test_a_tree_is_taken_apart_and_put_together() -> None:
    leaves, spec = trees.tree_flatten(NESTED)
    assert isinstance(spec, trees.TreeSpec), needs("tree_flatten returns a TreeSpec")
    assert trees.tree_unflatten(leaves, spec) == NESTED, needs("trees are put together again")
    assert trees.tree_leaves(NESTED) == leaves, needs("tree_leaves and tree_flatten agree")


def test_a_function_is_applied_to_every_leaf() -> None:
    doubled = trees.tree_map(lambda leaf: leaf and leaf * 2, NESTED)
    assert doubled == {"b": [2, (4, None)], "a": 6}, needs("tree_map keeps the tree")


def test_leaves_have_paths_that_can_be_read() -> None:
    paths = [trees.keystr(path) for path, _ in trees.tree_leaves_with_path({"a": [5]})]
    assert paths == ["['a'][0]"], needs("keystr writes a path as Python does")

"""What the call of a unit gives to others, as data: its structure, its shapes, its attributes.

Units also leave tensors in attributes of their modules (losses on the side, attention maps), and
the code that reads them later in forward may run on another rank. So these attributes count as part
of what a unit returns: ranks that leave the unit out find them where the unit would have put them.

Structures are sent as small examples, trees of tuples, lists and dicts with numbers for leaves,
which need no pickle. A class that checks its own contents, as `PackedSequence` does, is sent with
its own leaves instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.route import TensorShape
from shoal.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

# Structures -----------------------------------------------------------------------------------


def example_of(structure: TreeSpec, leaves: Sequence[Any]) -> Any:
    """A tree of this structure, as small as possible; ``leaves`` are those of the real tree.

    Example:
        >>> leaves, structure = tree_flatten({"a": torch.zeros(9), "b": [None]})
        >>> example_of(structure, leaves)
        {'a': 0, 'b': [1]}
    """
    try:
        return tree_unflatten(list(range(len(leaves))), structure)
    except Exception:  # a class refused numbers as its contents
        return tree_unflatten([_sendable(leaf) for leaf in leaves], structure)


def structure_of(example: Any) -> TreeSpec:
    """The inverse of `example_of`."""
    structure: TreeSpec = tree_flatten(example)[1]
    return structure


def check_dataclasses(unit: str, leaves: Sequence[Any]) -> None:
    """Refuses dataclasses that torch does not look into: their tensors would not travel."""
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


# Shapes ---------------------------------------------------------------------------------------


def encode_leaf(leaf: Any) -> Any:
    """A shape as plain data that needs no pickle; other leaves as they are."""
    if isinstance(leaf, TensorShape):
        return ("shape", list(leaf.size), str(leaf.dtype).removeprefix("torch."))
    return ("other", leaf, "")


def decode_leaf(encoded: Any) -> Any:
    """The inverse of `encode_leaf`."""
    kind, content, dtype = encoded
    return TensorShape(tuple(content), getattr(torch, dtype)) if kind == "shape" else content


# Attributes -----------------------------------------------------------------------------------


def tensors_in(module: nn.Module) -> dict[str, Tensor]:
    """The tensors in attributes of a module and its submodules, except parameters and buffers.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 2))
        >>> module[0].loss = torch.zeros(())
        >>> list(tensors_in(module))
        ['0.loss']
    """
    return {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }


def tensors_since(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in attributes that were not there before."""
    now = tensors_in(module)
    return {name: value for name, value in now.items() if before.get(name) is not value}


def read_attributes(module: nn.Module, names: Collection[str]) -> dict[str, Any]:
    """The current values of attributes; None for a missing one."""
    return {name: vars(part).get(attribute) for name, part, attribute in _owners(module, names)}


def write_attributes(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Puts tensors into attributes."""
    for name, part, attribute in _owners(module, values):
        vars(part)[attribute] = values[name]


def _owners(module: nn.Module, names: Collection[str]) -> list[tuple[str, nn.Module, str]]:
    """For each name the submodule that has the attribute, and the attribute."""
    split = [(name, *name.rpartition(".")[::2]) for name in names]
    return [(name, module.get_submodule(path), attribute) for name, path, attribute in split]

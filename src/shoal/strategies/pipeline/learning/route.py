"""The route of a kind of input through a model: which units run in which chunk, what travels.

A route is learned once for each kind of input, with one micro-batch that runs through all chunks
one after the other, and is the same on every rank. Look here for what a stage sends and receives.

Units also leave tensors in attributes of their modules (losses on the side, attention maps), and
the code that reads them later in forward may run on another rank. So these attributes count as part
of what a unit returns: ranks that leave the unit out find them where the unit would have put them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.pipeline.schedules import Pass
from shoal.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class ValueId(NamedTuple):
    """Names a value that another rank may have: a leaf of what a unit returned, or a parameter.

    Attributes:
        call: The number of the call in forward; -1 for a parameter.
        leaf: The number of the leaf in what the call returned.
    """

    call: int
    leaf: int
    name: str

    @classmethod
    def of_parameter(cls, name: str) -> ValueId:
        """Names a parameter or a buffer."""
        return cls(-1, 0, name)

    @property
    def is_computed(self) -> bool:
        """Whether a unit returned it."""
        return self.call >= 0


class TensorShape(NamedTuple):
    """What a rank knows of a tensor that another rank has."""

    size: tuple[int, ...]
    dtype: torch.dtype


Shapes = Sequence[Sequence[Any]]
"""For each call what `UnitCall.leaves` says, for micro-batches of one size."""


@dataclass
class UnitCall:
    """One call of a unit, the same in every micro-batch of a kind.

    Attributes:
        structure: That of what the unit returns and of what it leaves in attributes.
        leaves: For each leaf its shape, or the leaf itself if it is not a tensor.
        needs_grad: The leaves that have gradients.
        rewritten: The leaves that the model writes into afterwards.
    """

    unit: str
    chunk: int
    structure: TreeSpec
    attributes: list[str]
    leaves: list[Any]
    needs_grad: set[int]
    rewritten: set[int] = field(default_factory=set)


Exchange = dict[int, list[ValueId]]
"""Values by the chunk that sends or receives them."""


@dataclass
class Route:
    """The calls of units in order, and which values travel between chunks.

    Attributes:
        wanted: For each chunk the values of earlier chunks that it needs.
        overwritten: For each chunk the wanted values that it writes into.
        borrowed: For each rank the parameters of other ranks that it needs.
        shapes: What the calls up to the end of a chunk return, by chunk and size of the inputs.
    """

    calls: list[UnitCall]
    wanted: dict[int, list[ValueId]]
    overwritten: dict[int, set[ValueId]]
    borrowed: dict[int, list[str]]
    shapes: dict[tuple[int, str], Shapes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the tables that every step looks at."""
        self.borrows = any(self.borrowed.values())
        values = {value for wanted in self.wanted.values() for value in wanted}
        self.needs_grad = {
            value for value in values if value.leaf in self.calls[value.call].needs_grad
        }
        """The values whose gradients travel back."""
        self.receives: dict[tuple[Pass, int], Exchange] = {}
        """What a chunk receives for a pass: values forward, gradients backward."""
        self.sends: dict[tuple[Pass, int], Exchange] = {}
        """What a chunk sends after a pass."""
        self.exported: dict[int, set[ValueId]] = {}
        """For each chunk its values that other chunks want."""
        for chunk in self.wanted:
            self._tabulate(chunk)

    def _tabulate(self, chunk: int) -> None:
        incoming: Exchange = {}
        for value in self.wanted[chunk]:
            incoming.setdefault(self.calls[value.call].chunk, []).append(value)
        outgoing = {
            target: [value for value in wanted if self.calls[value.call].chunk == chunk]
            for target, wanted in sorted(self.wanted.items())
        }
        outgoing = {target: values for target, values in outgoing.items() if values}
        self.receives[Pass.FORWARD, chunk] = incoming
        self.sends[Pass.FORWARD, chunk] = outgoing
        self.receives[Pass.BACKWARD, chunk] = self._gradients(outgoing)
        self.sends[Pass.BACKWARD, chunk] = self._gradients(incoming)
        self.receives[Pass.WEIGHTS, chunk] = {}
        self.exported[chunk] = {value for values in outgoing.values() for value in values}

    def _gradients(self, exchange: Exchange) -> Exchange:
        """The values of an exchange that have gradients."""
        found = {
            chunk: [value for value in values if value in self.needs_grad]
            for chunk, values in exchange.items()
        }
        return {chunk: values for chunk, values in found.items() if values}


# Structures: sent as small examples, trees of numbers, which need no pickle. A class that checks
# its own contents, as `PackedSequence` does, is sent with its own leaves instead.


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
        sendable = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(sendable, structure)


def structure_of(example: Any) -> TreeSpec:
    """The inverse of `example_of`."""
    structure: TreeSpec = tree_flatten(example)[1]
    return structure


def check_dataclasses(unit: str, leaves: Sequence[Any]) -> None:
    """Refuses dataclasses that torch does not look into: their tensors would not travel."""
    for leaf in leaves:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            continue
        contents = [getattr(leaf, each.name, None) for each in fields(leaf)]
        if any(isinstance(value, Tensor) for value in tree_leaves(contents)):
            kind = type(leaf).__name__
            raise ShoalError(
                f"{unit} returns a {kind}, and torch does not know that there are tensors in it: "
                f"call torch.utils._pytree.register_dataclass({kind}) before the model is wrapped, "
                "or return a tuple, a named tuple or a dict"
            )


def encode_leaf(leaf: Any) -> Any:
    """A shape as plain data that needs no pickle; other leaves as they are."""
    if isinstance(leaf, TensorShape):
        return ("shape", list(leaf.size), str(leaf.dtype).removeprefix("torch."))
    return ("other", leaf, "")


def decode_leaf(encoded: Any) -> Any:
    """The inverse of `encode_leaf`."""
    kind, content, dtype = encoded
    return TensorShape(tuple(content), getattr(torch, dtype)) if kind == "shape" else content


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

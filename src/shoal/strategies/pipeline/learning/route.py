"""The route of a kind of input through a model: which units run in which chunk, what travels.

A route is learned once for each kind of input, with one micro-batch that runs through all chunks
one after the other, and is the same on every rank. Look here for what a stage sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shoal.strategies.pipeline.schedule.schedules import Pass
from shoal.torch_internals.trees import TreeSpec


class ValueId(NamedTuple):
    """Names a value that another rank may have.

    It is a leaf of what the call of a unit returned, or a parameter.

    Attributes:
        call: The number of the call in forward; -1 for a parameter.
        leaf: The number of the leaf in what the call returned.
        name: The unit's, or the parameter's.
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
        unit: The unit's name.
        chunk: Where the unit runs.
        structure: That of what the unit returns and of what it leaves in attributes.
        attributes: The names of these attributes.
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
        calls: All calls of units.
        wanted: For each chunk the values of earlier chunks that it needs.
        overwritten: For each chunk the wanted values that it writes into.
        borrowed: For each rank the parameters of other ranks that it needs.
        shapes: What the calls of earlier chunks return, by chunk and size of the inputs.
        announced: The shapes that this rank's chunks have sent to the next chunk.
    """

    calls: list[UnitCall]
    wanted: dict[int, list[ValueId]]
    overwritten: dict[int, set[ValueId]]
    borrowed: dict[int, list[str]]
    shapes: dict[tuple[int, str], Shapes] = field(default_factory=dict)
    announced: dict[tuple[int, str], Shapes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the tables that every step looks at."""
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

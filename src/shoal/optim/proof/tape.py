"""The operations of some steps, to be run again on other values.

What a step does to memory without torch's operations (numpy, an extension, a kernel of its own)
is not on the tape, and neither is what it decides by looking at the numbers. Running the tape on
other values then gives another result than the optimizer itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.optim.proof.following import Results
from shoal.optim.proof.modes import SeededRun
from shoal.optim.stepping.streams import Streams
from shoal.torch_internals.trees import tree_leaves, tree_map


class _TapeValue(NamedTuple):
    """Stands for the tensor of this number in a recorded call."""

    number: int


class _TapeCall(NamedTuple):
    operation: Any
    args: Any
    kwargs: Any
    marks: Results
    results: list[Any]


class Tape:
    """What was recorded, step by step."""

    def __init__(self, streams: Streams) -> None:
        """Empty; what is recorded draws from these streams."""
        self._seeded = SeededRun(streams)
        self._steps: list[list[_TapeCall]] = [[]]
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._constants: dict[int, Tensor] = {}

    def next_step(self) -> None:
        """What follows is part of another step."""
        self._steps.append([])

    def run(self, operation: Any, args: Any, kwargs: dict[str, Any], marks: Results) -> Any:
        """Runs an operation and records it."""
        noted_args, noted_kwargs = tree_map(self._noted, (args, kwargs))
        result = self._seeded(operation, args, kwargs, marks)
        results = [self.number_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._steps[-1].append(_TapeCall(operation, noted_args, noted_kwargs, marks, results))
        return result

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._numbers:  # it is no result of an operation
            self._constants[self.number_of(leaf)] = leaf.detach().clone()
        return _TapeValue(self._numbers[id(leaf)])

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor, which is kept alive so that no other gets its ``id``."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[id(tensor)]

    def replay(self, inputs: Mapping[int, Tensor], streams: Streams) -> list[Tensor | None]:
        """Runs it on other inputs; returns all tensors by their number."""
        values: list[Tensor | None] = [None] * len(self._tensors)
        for number, constant in self._constants.items():
            values[number] = constant.clone()
        for number, value in inputs.items():
            values[number] = value
        seeded = SeededRun(streams)
        self._play(self._steps[0], values, seeded)
        for calls in self._steps[1:]:
            with streams.step():
                self._play(calls, values, seeded)
        return values

    def _play(
        self, calls: Sequence[_TapeCall], values: list[Tensor | None], seeded: SeededRun
    ) -> None:
        def given(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, _TapeValue) else leaf

        for call in calls:
            args, kwargs = tree_map(
                given, (call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, _TapeValue)
            )
            result = seeded(call.operation, args, kwargs, call.marks)
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for number, leaf in zip(call.results, leaves, strict=True):
                values[number] = leaf

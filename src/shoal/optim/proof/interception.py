"""Intercepts every operation of a step, and every look at a tensor; records them on a tape.

What a step does to memory without torch's operations (numpy, an extension, a kernel of its own)
is not on the tape, and neither is what it decides by looking at the numbers. Running the tape on
other values then gives another result than the optimizer itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.optim.proof.following import MIXED, Following, Results
from shoal.optim.proof.rules import Effect, rule_for
from shoal.optim.stepping.streams import Streams
from shoal.torch_internals.tensors import ATTRIBUTES_OF_MEMORY, DispatchMode, without_torch_function
from shoal.torch_internals.trees import tree_leaves, tree_map

Run = Callable[[Any, Any, dict[str, Any], Results], Any]
"""Runs an operation, given its arguments and the marks that its results will have."""

_SHAPE_READS: dict[Any, str] = {
    Tensor.shape.__get__: "shape",  # type: ignore[attr-defined]
    Tensor.ndim.__get__: "ndim",  # type: ignore[attr-defined]
    Tensor.nbytes.__get__: "nbytes",  # type: ignore[attr-defined]
    torch.numel: "numel",
    torch.is_same_size: "is_same_size",
    **{
        getattr(Tensor, name): name
        for name in ("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset")
    },
    Tensor.__len__: "len",
    Tensor.is_same_size: "is_same_size",
}
_MEMORY_READS: dict[Any, str] = {
    **{
        getattr(Tensor, name): name
        for name in (
            "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "share_memory_",
            "__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", *ATTRIBUTES_OF_MEMORY,
        )
    },
    Tensor.__cuda_array_interface__.__get__: "__cuda_array_interface__",
}  # fmt: skip


class SeededRun:
    """Runs operations; what draws for one parameter draws from that parameter's stream."""

    def __init__(self, streams: Streams | None, numbers: Sequence[int] | None = None) -> None:
        """``numbers`` has a parameter's number for its owner; without, they are the same."""
        self._streams, self._numbers = streams, numbers

    def __call__(self, operation: Any, args: Any, kwargs: dict[str, Any], marks: Results) -> Any:
        """Runs an operation."""
        if self._streams is None or rule_for(operation).effect is not Effect.DRAWS:
            return operation(*args, **kwargs)
        if marks[0] is None or marks[0].owner == MIXED:
            return operation(*args, **kwargs)
        owner = marks[0].owner
        number = owner if self._numbers is None else self._numbers[owner]
        return self._streams.draw(number, operation, args, kwargs)


@contextlib.contextmanager
def intercepting(following: Following, run: Run) -> Iterator[None]:
    """Inside, every operation is looked at by ``following`` and run by ``run``."""
    with _Operations(following, run), _Looks(following):
        yield


class _Operations(DispatchMode):
    """Everything that computes."""

    def __init__(self, following: Following, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._following, self._run = following, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rule = kwargs or {}, rule_for(func)
        # What is looked at here is not the optimizer's doing.
        with without_torch_function():
            marks = self._following.before(rule, args, kwargs)
            result = self._run(func, args, kwargs, marks)
            self._following.after(rule, args, kwargs, result, marks)
        return result


class _Looks(TorchFunctionMode):
    """What asks a tensor for something without computing: its shape, its memory."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _SHAPE_READS.get(func)
        if name is not None:
            self._following.look_at_shape(args[0], name)
        elif func in _MEMORY_READS:
            self._following.look_at_memory(args[0], _MEMORY_READS[func])
        return func(*args, **(kwargs or {}))


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

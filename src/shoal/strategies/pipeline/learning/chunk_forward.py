"""One micro-batch's forward through one chunk: the model's own forward, with parts left out.

[Note: walks]
Every rank runs the model's own forward. A unit of an earlier chunk is not run: what it returned
arrives from there, or is absent if nobody here needs it. A unit of this chunk runs, with real
values for absent ones. When a unit of a later chunk is called, forward is left. So masks, position
embeddings and whatever else the model computes between its units are computed wherever they are
needed, by the model itself.

A unit runs on the chunk it was given to, or on a later one if forward has got that far already:
its parameters are then borrowed. Units that are not part of the chain run where forward has got to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.absent_value import (
    AbsentValue,
    Learner,
    Source,
    absent_error,
    absent_like,
    hidden,
)
from shoal.strategies.pipeline.learning.attributes import left_since, read, tensors_in, write
from shoal.strategies.pipeline.learning.route import Call, Itinerary, Root, Shape, Shapes
from shoal.strategies.pipeline.learning.unit_results import check_known
from shoal.strategies.pipeline.stages.units import Unit


class _Leave(BaseException):
    """Ends forward where another rank goes on. Not an Exception: models may catch those."""


class Path:
    """Where a model's units are called: that is diverted while the path exists.

    Hooks of a unit run where the unit runs, for they may need its parameters and buffers. A model
    may also call a unit's forward itself, without hooks.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], chunks: Mapping[str, int]) -> None:
        """``chunks`` says where each unit's parameters are."""
        self.walk: Walk | None = None
        self._is_in_loss = False
        self._chunks = chunks
        for unit in units:
            for method in ("_call_impl", "forward"):
                own = _own_method(unit.module, method)
                setattr(unit.module, method, self._diverted(unit, own))
            compiled = unit.module._compiled_call_impl
            if compiled is not None:  # takes the place of the first
                unit.module._compiled_call_impl = self._diverted(unit, compiled)
        model.forward = self._left_early(model.forward)

    def _diverted(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            walk = self.walk
            if walk is None or walk.is_inside:
                return forward(*args, **kwargs)
            return walk.call(unit, forward, args, kwargs)

        return call

    def _left_early(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            walk = self.walk
            if walk is None:
                return forward(*args, **kwargs)
            walk.has_begun = True
            try:
                return walk.arrived(forward(*args, **kwargs))
            except _Leave:
                return None

        return call

    @property
    def is_in_users_code(self) -> bool:
        """Whether a loss or the model's own forward is running, and not hooks in front of it."""
        return self._is_in_loss or (self.walk is not None and self.walk.has_begun)

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """Around a loss function."""
        self._is_in_loss = True
        try:
            yield
        finally:
            self._is_in_loss = False

    def chunk_of(self, unit: Unit, frontier: int) -> int:
        """Where a call runs, if forward has got to the chunk ``frontier``."""
        return max(self._chunks[unit.name], frontier) if unit.is_link else frontier


def _own_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """A module's method, whatever class it is of when that is called: it may be given another."""
    given: Callable[..., Any] = getattr(module, name)
    if name in vars(module):
        return given

    @functools.wraps(given)
    def method(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(module), name)(module, *args, **kwargs)

    return method


class Walk:
    """One micro-batch's forward through one chunk."""

    def __init__(
        self,
        path: Path,
        chunk: int,
        num_chunks: int,
        itinerary: Itinerary,
        values: Mapping[Root, Tensor],
    ) -> None:
        """``values`` are what has arrived of earlier chunks."""
        self._path, self.chunk, self._is_last = path, chunk, chunk == num_chunks - 1
        self._itinerary, self._values = itinerary, values
        self._exported = itinerary.exported(chunk)
        self._frontier = self._num_calls = 0
        self.has_begun = self.is_inside = False
        self.produced: dict[Root, Tensor] = {}
        self.shapes: list[list[Any]] = []

    def run(self, call: Callable[[], Any], shapes: Shapes) -> Any:
        """Calls the model; returns its output on the last chunk.

        ``shapes`` are those of the earlier chunks' calls; `shapes` has this chunk's afterwards.
        """
        self._known = shapes
        outer, self._path.walk = self._path.walk, self
        self._has_grad = torch.is_grad_enabled()
        try:
            return call()
        finally:
            self._path.walk = outer

    def call(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called: it runs, is left out, or forward ends."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._frontier = self._path.chunk_of(unit, self._frontier)
        if self._frontier > self.chunk:
            raise _Leave
        if self._frontier < self.chunk:
            return self._skipped(number, unit)
        if torch.is_grad_enabled() != self._has_grad:
            raise ShoalError(
                f"{unit.name} runs without gradients inside of a forward that has them, as "
                "reentrant activation checkpointing does: use it with use_reentrant=False, and "
                "leave torch.no_grad() to whole calls of the model"
            )
        args, kwargs = self._present(args), self._present(kwargs)
        self.is_inside = True
        try:
            output = self._ran(number, unit, forward, args, kwargs)
        finally:
            self.is_inside = False
        return output

    def _ran(self, number: int, unit: Unit, forward: Any, args: Any, kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        call = self._expected(number, unit)
        left = read(unit.module, call.left)
        leaves, spec = tree_flatten((output, left))
        described = self._described(number, call, leaves)
        _check_same(unit, call, described, spec)
        self.shapes.append(described)
        for place, leaf in enumerate(leaves):
            root = (number, place)
            if root in self._exported:
                if isinstance(leaf, AbsentValue):
                    raise absent_error([leaf])
                self.produced[root] = leaf.clone() if place in call.rewritten else leaf
        return output

    def _described(self, number: int, call: Call, leaves: Sequence[Any]) -> list[Any]:
        """What others are told; of attributes that nobody else reads what they know already."""
        num_returned = len(leaves) - len(call.left)
        return [
            describe(leaf)
            if place < num_returned or (number, place) in self._exported
            else call.leaves[place]
            for place, leaf in enumerate(leaves)
        ]

    def _expected(self, number: int, unit: Unit) -> Call:
        calls = self._itinerary.calls
        if number >= len(calls) or calls[number].unit != unit.name:
            was = calls[number].unit if number < len(calls) else "nothing more"
            raise ShoalError(
                f"forward calls {unit.name} where it called {was} when the way through the model "
                "was learned: the order of a pipelined model's parts must not depend on the "
                "numbers in a batch"
            )
        return calls[number]

    def _skipped(self, number: int, unit: Unit) -> Any:
        """What an earlier chunk's unit returned."""
        call = self._expected(number, unit)
        if number >= len(self._known):
            raise ShoalError(f"nothing is known of what {unit.name} returned on another rank")
        self.shapes.append(list(self._known[number]))

        def leaf(place: int) -> Any:
            root = (number, place)
            if root in self._values:
                return self._values[root]
            shape = self._known[number][place]
            if not isinstance(shape, Shape):
                return shape
            device = self._path_device()
            return absent_like(shape.size, shape.dtype, device, Source(number, place, unit.name))

        return _left_out(unit, call, leaf)

    def _path_device(self) -> torch.device:
        return next((value.device for value in self._values.values()), torch.device("cpu"))

    def _present(self, arguments: Any) -> Any:
        """Arguments of a unit that runs here: nothing of them may be absent."""
        absent = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, AbsentValue)]
        if absent:
            raise absent_error(absent)
        return arguments

    def arrived(self, output: Any) -> Any:
        """Forward has come to its end: on the last chunk, with what the model returns."""
        if not self._is_last:
            raise ShoalError(
                f"forward came to its end in chunk {self.chunk}, before the units of later chunks "
                "were called: give the pipeline fewer stages, or name where to cut (cut=)"
            )
        return self._present(output)


class LearningWalk(Walk):
    """A walk that notes what is called, and which values of earlier chunks are wanted."""

    def __init__(
        self,
        path: Path,
        chunk: int,
        num_chunks: int,
        itinerary: Itinerary,
        values: Mapping[Root, Tensor],
        learner: Learner,
        borrow: Callable[[Unit], None],
    ) -> None:
        """``values`` are all values of earlier chunks; ``itinerary`` grows.

        ``borrow(unit)`` is called before a unit runs, to get parameters that others have.
        """
        super().__init__(path, chunk, num_chunks, itinerary, values)
        self._learner, self._borrow = learner, borrow
        self._versions: dict[Any, tuple[Tensor, int]] = {}
        self.units: list[Unit] = []
        """Those that ran here."""

    def _skipped(self, number: int, unit: Unit) -> Any:
        call = self._expected(number, unit)
        self.shapes.append(list(call.leaves))

        def leaf(place: int) -> Any:
            root = (number, place)
            if not isinstance(call.leaves[place], Shape):
                return call.leaves[place]
            source = Source(number, place, unit.name)
            needs_grad = place in call.needs_grad and self._has_grad
            # Models may write into it: what others are shown is another copy.
            real = self._values[root].clone()
            value = hidden(real, source, self._learner, needs_grad=needs_grad)
            assert value.behind is not None
            self._versions["in", *root] = (value.behind, value.behind._version)
            return value

        return _left_out(unit, call, leaf)

    def _ran(self, number: int, unit: Unit, forward: Any, args: Any, kwargs: Any) -> Any:
        self._borrow(unit)
        before = [(leaf, _version(leaf)) for leaf in tree_leaves((args, kwargs))]
        attributes = tensors_in(unit.module)
        output = self._real(forward(*args, **kwargs))
        left = left_since(unit.module, attributes)
        leaves, spec = tree_flatten((output, left))
        _check_arguments(unit, before, tree_leaves((args, kwargs)), leaves)
        check_known(unit.name, leaves)
        self.units.append(unit)
        call = Call(
            unit.name,
            self.chunk,
            spec,
            list(left),
            [describe(leaf) for leaf in leaves],
            {n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad},
            set(),
        )
        self._itinerary.calls.append(call)
        self.shapes.append(list(call.leaves))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.produced[number, place] = leaf.detach().clone()
                self._versions[number, place] = (leaf, leaf._version)
        return output

    def _present(self, arguments: Any) -> Any:
        return self._real(arguments)

    def _real(self, tree: Any) -> Any:
        return tree_map(
            lambda leaf: self._learner.use(leaf) if isinstance(leaf, AbsentValue) else leaf, tree
        )

    def rewritten(self) -> set[Any]:
        """Values that were written into: own ones, and ``("in", ...)`` those of others."""
        written = {("in", source.call, source.leaf) for source in self._learner.written}
        return written | {
            root for root, (value, was) in self._versions.items() if value._version != was
        }


def _left_out(unit: Unit, call: Call, leaf: Callable[[int], Any]) -> Any:
    """What a unit that is not run returns; what it leaves in attributes is there as well."""
    leaves = [leaf(place) for place in range(len(call.leaves))]
    output, left = tree_unflatten(leaves, call.skeleton)
    write(unit.module, left)
    return output


def describe(leaf: Any) -> Any:
    """A leaf as other ranks know it: shapes of tensors, and other things as they are."""
    return Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _version(leaf: Any) -> int:
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return 0
    return leaf._version


def _check_same(unit: Unit, call: Call, leaves: Sequence[Any], skeleton: TreeSpec) -> None:
    is_same = len(leaves) == len(call.leaves) and all(
        _is_alike(one, other) for one, other in zip(leaves, call.leaves, strict=True)
    )
    if not is_same or skeleton != call.skeleton:
        raise ShoalError(
            f"{unit.name} returned {leaves} where it returned {call.leaves} when the way through "
            "the model was learned: what a unit returns may differ in shapes and in tensors' "
            "values, but not in structure, dtypes or plain numbers. Return such numbers as tensors"
        )


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Shape) or isinstance(other, Shape):
        return (
            isinstance(one, Shape)
            and isinstance(other, Shape)
            and (one.dtype, len(one.size)) == (other.dtype, len(other.size))
        )
    return type(one) is type(other) and bool(one == other)


def _check_arguments(unit: Unit, before: Any, after: Sequence[Any], returned: Any) -> None:
    """Refuses a unit that hands results on by writing into its arguments."""
    is_same = len(before) == len(after) and all(
        old is new for (old, _), new in zip(before, after, strict=True)
    )
    kept = {id(leaf) for leaf in returned}
    written = [leaf for leaf, was in before if _version(leaf) != was and id(leaf) not in kept]
    if not is_same or written:
        raise ShoalError(
            f"{unit.name} writes into its arguments, which ranks that leave it out would not see: "
            "let it return what it computes, or cut the pipeline elsewhere (cut=)"
        )

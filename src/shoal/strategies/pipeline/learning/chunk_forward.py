"""One micro-batch's forward through one chunk: the model's own forward, with units left out.

[Note: chunk forwards]
Every rank runs the model's own forward. A unit of an earlier chunk is not run: its results arrive
from there, or are absent if no unit here needs them. A unit of this chunk runs, with real values
for absent ones. When a unit of a later chunk is called, forward is left. So masks, position
embeddings and whatever else the model computes between its units are computed wherever they are
needed, by the model itself.

A unit runs in the chunk that has its parameters, or in a later one if forward has reached that
already: the parameters are then borrowed. Units that are not part of the chain run in the chunk
that forward has reached.

[Note: listed parameters]
While the model's own forward or a loss runs, ``parameters()`` lists those of all ranks: a penalty
over all weights, or a look at the dtype of the first, means the whole model. Optimizers, clipping
and states ask at other times, and mean this rank's. Parameters of other ranks are absent values, or
borrowed if their numbers were used when the route was learned. Losses are not learned: a loss that
uses parameters of other ranks ends in an error, and not in the sum over one rank's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, absent_error, absent_like
from shoal.strategies.pipeline.learning.route import (
    Shapes,
    TensorShape,
    UnitCall,
    ValueId,
    read_attributes,
    write_attributes,
)
from shoal.strategies.pipeline.units import Unit
from shoal.torch_internals.modules import CALL, COMPILED_CALL, compiled_call, named_members
from shoal.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from shoal.strategies.pipeline.stage import Stage


class _LeaveForward(BaseException):
    """Ends forward where another rank goes on. Not an Exception: models may catch those."""


class CallInterceptor:
    """Hands the calls of a model's units to the `ChunkForward` under way.

    Hooks of a unit run where the unit runs, because they may need its parameters and buffers. A
    model may also call a unit's forward itself, without hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        list_all: Callable[[nn.Module], Iterator[tuple[str, Tensor | None]]],
    ) -> None:
        """``list_all`` gives a module's parameters on all ranks; see [Note: listed parameters]."""
        self.current: ChunkForward | None = None
        self._is_in_loss = False
        for unit in units:
            for name in (CALL, "forward"):
                setattr(unit.module, name, self._intercepted(unit, name))
            if compiled_call(unit.module) is not None:
                setattr(unit.module, COMPILED_CALL, self._intercepted(unit, COMPILED_CALL))
        model.forward = self._left_early(model.forward)
        self._list_all = list_all
        for part in model.modules():
            # A method, not a function that knows the module: copies of a part list their own.
            vars(part)["named_parameters"] = MethodType(self._named_parameters, part)

    def _intercepted(self, unit: Unit, name: str) -> Callable[..., Any]:
        module: Any = unit.module
        given: Callable[..., Any] = getattr(module, name)
        is_own = name in vars(module)

        @functools.wraps(given)
        def call(*args: Any, **kwargs: Any) -> Any:
            current = self.current
            # Looked up now: the module's class may have changed.
            forward = given if is_own else MethodType(getattr(type(module), name), module)
            if current is None or current.is_inside_unit:
                return forward(*args, **kwargs)
            return current.call(unit, forward, args, kwargs)

        return call

    def _left_early(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            current = self.current
            if current is None:
                return forward(*args, **kwargs)
            current.has_begun = True
            try:
                return current.finish(forward(*args, **kwargs))
            except _LeaveForward:
                return None

        return call

    def _named_parameters(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # Hooks before the model's own forward do not count as the user's code.
        is_in_forward = self.current is not None and self.current.has_begun
        if self._is_in_loss or is_in_forward:
            yield from named_members(module, self._list_all, *args, **kwargs)
        else:
            yield from type(module).named_parameters(module, *args, **kwargs)

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """Around a loss function."""
        self._is_in_loss = True
        try:
            yield
        finally:
            self._is_in_loss = False


class ChunkForward:
    """One micro-batch's forward through one chunk; see [Note: chunk forwards]."""

    def __init__(
        self,
        stage: Stage,
        chunk: int,
        calls: list[UnitCall],
        values: Mapping[ValueId, Tensor],
        shapes: Shapes = (),
        exported: Collection[ValueId] = (),
    ) -> None:
        """Nothing has run yet.

        Args:
            stage: This rank's.
            chunk: One of the stage's chunks.
            calls: The route's calls of units.
            values: What has arrived of earlier chunks.
            shapes: What the calls of earlier chunks return.
            exported: The values of this chunk that other chunks want.
        """
        self._interceptor, self._chunk_of_unit = stage.interceptor, stage.chunk_of_unit
        self.chunk, self._is_last = chunk, chunk == stage.num_chunks - 1
        self._calls, self._values, self._known, self._exported = calls, values, shapes, exported
        self._reached = self._num_calls = 0
        self.has_begun = self.is_inside_unit = False
        self.produced: dict[ValueId, Tensor] = {}
        """The exported values."""
        self.shapes: list[Sequence[Any]] = []
        """What the calls up to the end of this chunk returned."""

    def run(self, call_model: Callable[..., Any], *args: Any) -> Any:
        """Calls the model; returns its output on the last chunk."""
        outer, self._interceptor.current = self._interceptor.current, self
        self._has_grad = torch.is_grad_enabled()
        try:
            return call_model(*args)
        finally:
            self._interceptor.current = outer

    def call(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called: it runs, is left out, or forward ends."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if unit.is_in_chain:
            self._reached = max(self._chunk_of_unit[unit.name], self._reached)
        if self._reached > self.chunk:
            raise _LeaveForward
        if self._reached < self.chunk:
            return self._skip_unit(number, unit)
        if torch.is_grad_enabled() != self._has_grad:
            raise ShoalError(
                f"{unit.name} runs without gradients inside of a forward that has them, as "
                "reentrant activation checkpointing does: use it with use_reentrant=False, and "
                "leave torch.no_grad() to whole calls of the model"
            )
        args, kwargs = self._require_present((args, kwargs))
        self.is_inside_unit = True
        try:
            return self._run_unit(number, unit, forward, args, kwargs)
        finally:
            self.is_inside_unit = False

    def _run_unit(self, number: int, unit: Unit, forward: Any, args: Any, kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        call = self._expected_call(number, unit)
        attributes = read_attributes(unit.module, call.attributes) if call.attributes else {}
        leaves, structure = tree_flatten((output, attributes))
        ids = [ValueId(number, index, unit.name) for index in range(len(leaves))]
        num_returned = len(leaves) - len(call.attributes)
        described = [  # unchanged for attributes that no other chunk reads
            describe(leaf)
            if value_id.leaf < num_returned or value_id in self._exported
            else call.leaves[value_id.leaf]
            for value_id, leaf in zip(ids, leaves, strict=True)
        ]
        _check_same(unit, call, described, structure)
        self.shapes.append(described)
        for value_id, leaf in zip(ids, leaves, strict=True):
            if value_id in self._exported:
                if isinstance(leaf, AbsentValue):
                    raise absent_error([leaf])
                self.produced[value_id] = leaf.clone() if value_id.leaf in call.rewritten else leaf
        return output

    def _expected_call(self, number: int, unit: Unit) -> UnitCall:
        calls = self._calls
        if number >= len(calls) or calls[number].unit != unit.name:
            was = calls[number].unit if number < len(calls) else "nothing more"
            raise ShoalError(
                f"forward calls {unit.name} where it called {was} when the route through the model "
                "was learned: the order of a pipelined model's parts must not depend on the "
                "numbers in a batch"
            )
        return calls[number]

    def _skip_unit(self, number: int, unit: Unit) -> Any:
        """What a unit of an earlier chunk returned there."""
        call = self._expected_call(number, unit)
        if number >= len(self._known):
            raise ShoalError(f"nothing is known of what {unit.name} returned on another rank")
        known = self._known[number]
        self.shapes.append(known)

        def leaf(value_id: ValueId) -> Any:
            if value_id in self._values:
                return self._values[value_id]
            shape = known[value_id.leaf]
            if not isinstance(shape, TensorShape):
                return shape
            arrived = next(iter(self._values.values()), None)
            device = torch.device("cpu") if arrived is None else arrived.device
            return absent_like(shape.size, shape.dtype, device, value_id)

        return put_results(unit, number, call, leaf)

    def _require_present(self, tree: Any) -> Any:
        """Refuses absent values: a unit that runs here and the model's output need numbers."""
        absent = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, AbsentValue)]
        if absent:
            raise absent_error(absent)
        return tree

    def finish(self, output: Any) -> Any:
        """Forward has returned, which only happens on the last chunk."""
        if not self._is_last:
            raise ShoalError(
                f"forward came to its end in chunk {self.chunk}, before the units of later chunks "
                "were called: give the pipeline fewer stages, or name where to cut (cut=)"
            )
        return self._require_present(output)


def put_results(unit: Unit, number: int, call: UnitCall, leaf: Callable[[ValueId], Any]) -> Any:
    """What a unit that is left out returns; what it leaves in attributes is put there."""
    leaves = [leaf(ValueId(number, index, unit.name)) for index in range(len(call.leaves))]
    output, attributes = tree_unflatten(leaves, call.structure)
    if attributes:
        write_attributes(unit.module, attributes)
    return output


def describe(leaf: Any) -> Any:
    """A leaf as other ranks know it: shapes of tensors, and other things as they are."""
    return TensorShape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _check_same(unit: Unit, call: UnitCall, leaves: Sequence[Any], structure: TreeSpec) -> None:
    is_same = len(leaves) == len(call.leaves) and all(map(_is_alike, leaves, call.leaves))
    if not is_same or structure != call.structure:
        raise ShoalError(
            f"{unit.name} returned {leaves} where it returned {call.leaves} when the route through "
            "the model was learned: what a unit returns may differ in shapes and in tensors' "
            "values, but not in structure, dtypes or plain numbers. Return such numbers as tensors"
        )


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, TensorShape) and isinstance(other, TensorShape):
        return (one.dtype, len(one.size)) == (other.dtype, len(other.size))
    return type(one) is type(other) and bool(one == other)

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
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, absent_error, absent_like
from shoal.strategies.pipeline.learning.route import Shapes, TensorShape, UnitCall, ValueId
from shoal.strategies.pipeline.learning.unit_results import read_attributes, write_attributes
from shoal.strategies.pipeline.stages.units import Unit
from shoal.torch_internals.modules import CALL, compiled_call, set_compiled_call
from shoal.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from shoal.strategies.pipeline.stages.stage import Stage


class _LeaveForward(BaseException):
    """Ends forward where another rank goes on. Not an Exception: models may catch those."""


class CallInterceptor:
    """Hands the calls of a model's units to the `ChunkForward` under way.

    Hooks of a unit run where the unit runs, because they may need its parameters and buffers. A
    model may also call a unit's forward itself, without hooks.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], chunk_of_unit: Mapping[str, int]
    ) -> None:
        """Replaces the methods by which the units and the model are called."""
        self.current: ChunkForward | None = None
        self._is_in_loss = False
        self._chunk_of_unit = chunk_of_unit
        for unit in units:
            for method in (CALL, "forward"):
                own = _own_method(unit.module, method)
                setattr(unit.module, method, self._intercepted(unit, own))
            compiled = compiled_call(unit.module)
            if compiled is not None:
                set_compiled_call(unit.module, self._intercepted(unit, compiled))
        model.forward = self._left_early(model.forward)

    def _intercepted(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            current = self.current
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

    def is_in_users_code(self) -> bool:
        """Whether a loss or the model's own forward is running; hooks before it do not count."""
        return self._is_in_loss or (self.current is not None and self.current.has_begun)

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """Around a loss function."""
        self._is_in_loss = True
        try:
            yield
        finally:
            self._is_in_loss = False

    def chunk_of_call(self, unit: Unit, reached: int) -> int:
        """The chunk in which a unit runs, if forward has reached the chunk ``reached``."""
        return max(self._chunk_of_unit[unit.name], reached) if unit.is_in_chain else reached


def _own_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """A module's method, looked up when it is called: the module's class may change until then."""
    given: Callable[..., Any] = getattr(module, name)
    if name in vars(module):
        return given

    @functools.wraps(given)
    def method(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(module), name)(module, *args, **kwargs)

    return method


class ChunkForward:
    """One micro-batch's forward through one chunk; see [Note: chunk forwards]."""

    def __init__(
        self,
        stage: Stage,
        chunk: int,
        calls: list[UnitCall],
        values: Mapping[ValueId, Tensor],
        exported: Collection[ValueId] = (),
    ) -> None:
        """Nothing has run yet.

        Args:
            stage: This rank's.
            chunk: One of the stage's chunks.
            calls: The route's calls of units.
            values: What has arrived of earlier chunks.
            exported: The values of this chunk that other chunks want.
        """
        self._interceptor, self.chunk = stage.interceptor, chunk
        self._is_last = chunk == stage.num_chunks - 1
        self._calls, self._values, self._exported = calls, values, exported
        self._reached = self._num_calls = 0
        self.has_begun = self.is_inside_unit = False
        self.produced: dict[ValueId, Tensor] = {}
        """The exported values."""
        self.shapes: list[Sequence[Any]] = []
        """What the calls up to the end of this chunk returned."""

    def run(self, call_model: Callable[[], Any], shapes: Shapes) -> Any:
        """Calls the model; returns its output on the last chunk.

        ``shapes`` are what the calls of earlier chunks return.
        """
        self._known = shapes
        outer, self._interceptor.current = self._interceptor.current, self
        self._has_grad = torch.is_grad_enabled()
        try:
            return call_model()
        finally:
            self._interceptor.current = outer

    def call(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called: it runs, is left out, or forward ends."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._reached = self._interceptor.chunk_of_call(unit, self._reached)
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
        args, kwargs = self._require_present(args), self._require_present(kwargs)
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
        described = self._described(call, leaves, ids)
        _check_same(unit, call, described, structure)
        self.shapes.append(described)
        for value_id, leaf in zip(ids, leaves, strict=True):
            if value_id in self._exported:
                if isinstance(leaf, AbsentValue):
                    raise absent_error([leaf])
                self.produced[value_id] = leaf.clone() if value_id.leaf in call.rewritten else leaf
        return output

    def _described(
        self, call: UnitCall, leaves: Sequence[Any], ids: Sequence[ValueId]
    ) -> list[Any]:
        """What other ranks are told; unchanged for attributes that no other chunk reads."""
        num_returned = len(leaves) - len(call.attributes)
        return [
            describe(leaf)
            if value_id.leaf < num_returned or value_id in self._exported
            else call.leaves[value_id.leaf]
            for value_id, leaf in zip(ids, leaves, strict=True)
        ]

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
            return absent_like(shape.size, shape.dtype, self._device(), value_id)

        return put_results(unit, number, call, leaf)

    def _device(self) -> torch.device:
        return next((value.device for value in self._values.values()), torch.device("cpu"))

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

"""The forward of a chunk by which its route is learned: everything that happens is noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, ValueRecorder, hide
from shoal.strategies.pipeline.learning.chunk_forward import ChunkForward, describe, put_results
from shoal.strategies.pipeline.learning.route import TensorShape, UnitCall, ValueId
from shoal.strategies.pipeline.learning.unit_results import (
    check_dataclasses,
    tensors_in,
    tensors_since,
)
from shoal.strategies.pipeline.stages.units import Unit
from shoal.torch_internals.tensors import version_of
from shoal.torch_internals.trees import tree_flatten, tree_leaves, tree_map

if TYPE_CHECKING:
    from shoal.strategies.pipeline.stages.stage import Stage


class LearningForward(ChunkForward):
    """A chunk's forward that notes the calls of units, and which earlier values they use.

    All values of all units are produced, because it is not known yet which of them travel.
    """

    def __init__(
        self,
        stage: Stage,
        chunk: int,
        calls: list[UnitCall],
        values: Mapping[ValueId, Tensor],
        recorder: ValueRecorder,
        borrow: Callable[[Unit], None],
    ) -> None:
        """``calls`` grows; ``values`` are all values of earlier chunks.

        ``borrow(unit)`` is called before a unit runs, to get parameters that other ranks have.
        """
        super().__init__(stage, chunk, calls, values)
        self._recorder, self._borrow = recorder, borrow
        self._own_versions: dict[ValueId, tuple[Tensor, int]] = {}
        self._hidden_versions: dict[ValueId, tuple[Tensor, int]] = {}
        self.units: list[Unit] = []
        """The units that ran here."""

    def _skip_unit(self, number: int, unit: Unit) -> Any:
        call = self._expected_call(number, unit)
        self.shapes.append(list(call.leaves))

        def leaf(value_id: ValueId) -> Any:
            known = call.leaves[value_id.leaf]
            if not isinstance(known, TensorShape):
                return known
            needs_grad = value_id.leaf in call.needs_grad and self._has_grad
            # A copy: the model may write into it, and later chunks need the original.
            real = self._values[value_id].clone()
            value = hide(real, value_id, self._recorder, needs_grad=needs_grad)
            assert value.hidden is not None
            self._hidden_versions[value_id] = (value.hidden, version_of(value.hidden))
            return value

        return put_results(unit, number, call, leaf)

    def _run_unit(self, number: int, unit: Unit, forward: Any, args: Any, kwargs: Any) -> Any:
        self._borrow(unit)
        before = [(leaf, _version(leaf)) for leaf in tree_leaves((args, kwargs))]
        old_attributes = tensors_in(unit.module)
        output = self._require_present(forward(*args, **kwargs))
        attributes = tensors_since(unit.module, old_attributes)
        leaves, structure = tree_flatten((output, attributes))
        _check_arguments(unit, before, tree_leaves((args, kwargs)), leaves)
        check_dataclasses(unit.name, leaves)
        self.units.append(unit)
        shapes = [describe(leaf) for leaf in leaves]
        tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        needs_grad = {n for n, leaf in tensors.items() if leaf.requires_grad}
        self._calls.append(
            UnitCall(unit.name, self.chunk, structure, list(attributes), shapes, needs_grad)
        )
        self.shapes.append(list(shapes))
        for index, leaf in tensors.items():
            value_id = ValueId(number, index, unit.name)
            self.produced[value_id] = leaf.detach().clone()
            self._own_versions[value_id] = (leaf, version_of(leaf))
        return output

    def _require_present(self, tree: Any) -> Any:
        """Replaces absent values by their real ones, and notes that they are used."""
        return tree_map(
            lambda leaf: self._recorder.use(leaf) if isinstance(leaf, AbsentValue) else leaf, tree
        )

    def rewritten(self) -> set[ValueId]:
        """Values of this chunk that the model wrote into after their unit had returned."""
        return _changed(self._own_versions)

    def overwritten(self) -> set[ValueId]:
        """Values of earlier chunks that the model wrote into here."""
        return _changed(self._hidden_versions) | self._recorder.written


def _changed(versions: Mapping[ValueId, tuple[Tensor, int]]) -> set[ValueId]:
    return {value_id for value_id, (value, was) in versions.items() if version_of(value) != was}


def _version(leaf: Any) -> int:
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return 0
    return version_of(leaf)


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

"""How ranks learn the route through a model: one micro-batch, one chunk after the other.

The rank that has a chunk runs it. The others serve it meanwhile: they send parameters that it asks
for, and receive its report. In the end all ranks have the same `Route`. Random numbers, buffers and
attributes of modules are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.layers.module_snapshot import Snapshot
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, ValueRecorder, hide
from shoal.strategies.pipeline.learning.chunk_forward import ChunkForward, describe, put_results
from shoal.strategies.pipeline.learning.route import (
    Route,
    TensorShape,
    UnitCall,
    ValueId,
    check_dataclasses,
    decode_leaf,
    encode_leaf,
    example_of,
    structure_of,
    tensors_in,
    tensors_since,
)
from shoal.strategies.pipeline.stage import Stage
from shoal.strategies.pipeline.units import Unit
from shoal.torch_internals.tensors import version_of
from shoal.torch_internals.trees import tree_flatten, tree_leaves, tree_map
from shoal.torch_support.random_state import RandomState


def learn(stage: Stage, call_model: Callable[[], Any]) -> Route:
    """The route of one kind of input; all ranks of the pipeline call it together."""
    calls: list[UnitCall] = []
    wanted: dict[int, list[ValueId]] = {}
    overwritten: dict[int, set[ValueId]] = {}
    borrowed: dict[int, list[str]] = {rank: [] for rank in range(stage.group.size)}
    values: dict[ValueId, Tensor] = {}
    _share_trainability(stage)
    with _unchanged(stage.module):
        for chunk in range(stage.num_chunks):
            owner = stage.rank_of_chunk[chunk]
            if owner == stage.rank:
                report = _LearningForward(stage, chunk, calls, values).report(call_model)
            else:
                report = _serve(stage, owner)
                calls += map(_decoded_call, report["calls"])
            values |= {ValueId(*value_id): value for value_id, value in report["values"]}
            wanted[chunk] = [ValueId(*value_id) for value_id in report["wanted"]]
            overwritten[chunk] = {ValueId(*value_id) for value_id in report["overwritten"]}
            for call, leaf, _ in report["rewritten"]:
                calls[call].rewritten.add(leaf)
            borrowed[owner] += [name for name in report["borrowed"] if name not in borrowed[owner]]
    return Route(calls, wanted, overwritten, borrowed)


def _share_trainability(stage: Stage) -> None:
    """Tells all ranks which parameters of other ranks require gradients."""
    parameters = stage.parameters
    own = {n: p.requires_grad for n, p in parameters.by_name.items() if parameters.is_own(n)}
    for trainable in stage.group.all_gather_object(own):
        for name, is_trainable in trainable.items():
            if not parameters.is_own(name):
                parameters.by_name[name].requires_grad_(is_trainable)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restores random numbers, buffers and attributes: learning is no training step."""
    generators, attributes = RandomState.capture(), Snapshot(module)
    contents = [(tensor, tensor.detach().clone()) for tensor in _writable_tensors(module)]
    try:
        yield
    finally:
        generators.restore()
        attributes.restore()
        with torch.no_grad():
            for tensor, before in contents:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _writable_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The buffers and tensors in attributes that forward may write into."""
    for tensor in (*module.buffers(), *tensors_in(module).values()):
        is_here = tensor.layout is torch.strided and not isinstance(tensor, AbsentValue)
        if is_here and 0 not in tensor.stride() and not tensor.is_inference():
            yield tensor


class _LearningForward(ChunkForward):
    """The forward of a chunk that this rank has: notes what is called, and what units use.

    All values of all units are produced, because it is not known yet which of them travel.
    """

    def __init__(
        self, stage: Stage, chunk: int, calls: list[UnitCall], values: Mapping[ValueId, Tensor]
    ) -> None:
        """``calls`` and ``values`` are all of earlier chunks; ``calls`` grows."""
        super().__init__(stage, chunk, calls, values)
        self._stage, self._num_known = stage, len(calls)
        self._fetched: dict[str, Tensor] = {}
        self._recorder = ValueRecorder(self._fetch)
        self._own_versions: dict[ValueId, tuple[Tensor, int]] = {}
        self._hidden_versions: dict[ValueId, tuple[Tensor, int]] = {}
        self._units: list[Unit] = []

    def report(self, call_model: Callable[[], Any]) -> dict[str, Any]:
        """Runs the chunk; sends what it has found to all ranks, as data that needs no pickle."""
        with self._hidden_parameters():
            self.run(call_model)
        report = {
            "calls": [
                _encoded_call(number, call, self.produced)
                for number, call in enumerate(self._calls)
                if number >= self._num_known
            ],
            "values": [(tuple(value_id), value) for value_id, value in self.produced.items()],
            "wanted": _plain(value_id for value_id in self._recorder.used if value_id.is_computed),
            # Values of earlier chunks that the model wrote into here.
            "overwritten": _plain(_changed(self._hidden_versions) | self._recorder.written),
            # Values of this chunk that it wrote into after their unit had returned.
            "rewritten": _plain(_changed(self._own_versions)),
            "borrowed": self._borrowed(),
        }
        self._stage.group.broadcast_object(("done", report), root=self._stage.rank)
        return report

    def _borrowed(self) -> list[str]:
        """The parameters of other ranks that were used, in the model's order."""
        parameters = self._stage.parameters
        names = {name for unit in self._units for name in parameters.names_of(unit.module)}
        names |= {value_id.name for value_id in self._recorder.used if not value_id.is_computed}
        return [name for name in parameters.foreign if name in names]

    @contextmanager
    def _hidden_parameters(self) -> Iterator[None]:
        """Inside, parameters of other ranks are absent values that can be fetched."""
        parameters = self._stage.parameters
        for name in parameters.foreign:
            parameter = parameters.by_name[name]
            meta = torch.empty_like(parameter, device="meta")
            source = frozenset([ValueId.of_parameter(name)])
            value = AbsentValue(meta, parameter.device, source, self._recorder)
            parameters.show(name, value.requires_grad_(parameter.requires_grad))
        try:
            yield
        finally:
            for name in parameters.foreign:
                parameters.show_absent(name)

    def _fetch(self, name: str) -> Tensor:
        if name not in self._stage.parameters.by_name:
            raise ShoalError(
                f"another rank of the pipeline has the buffer {name}, and only parameters are "
                "lent: use it in its own module's forward only, and register modules in the order "
                "they are called, or cut the model elsewhere (cut=)"
            )
        if name not in self._fetched:
            self._stage.group.broadcast_object(("fetch", name), root=self._stage.rank)
            self._fetched[name] = _broadcast_parameter(self._stage, name)
        return self._fetched[name]

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
        self._borrow_for(unit)
        before = [(leaf, _version(leaf)) for leaf in tree_leaves((args, kwargs))]
        old_attributes = tensors_in(unit.module)
        output = self._require_present(forward(*args, **kwargs))
        attributes = tensors_since(unit.module, old_attributes)
        leaves, structure = tree_flatten((output, attributes))
        _check_arguments(unit, before, tree_leaves((args, kwargs)), leaves)
        check_dataclasses(unit.name, leaves)
        self._units.append(unit)
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

    def _borrow_for(self, unit: Unit) -> None:
        """Fetches the parameters of a unit that another rank has and that runs here."""
        parameters = self._stage.parameters
        for name in parameters.names_of(unit.module):
            if not parameters.is_own(name):
                value = self._fetch(name).detach()
                parameters.show(name, value.requires_grad_(parameters.by_name[name].requires_grad))

    def _require_present(self, tree: Any) -> Any:
        """Replaces absent values by their real ones, and notes that they are used."""
        return tree_map(
            lambda leaf: self._recorder.use(leaf) if isinstance(leaf, AbsentValue) else leaf, tree
        )


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


def _serve(stage: Stage, learner: int) -> dict[str, Any]:
    """Sends parameters to the rank that runs its chunk, until that rank reports."""
    while True:
        what, content = stage.group.broadcast_object(root=learner)
        if what == "done":
            report: dict[str, Any] = content
            return report
        _broadcast_parameter(stage, content)


def _broadcast_parameter(stage: Stage, name: str) -> Tensor:
    owner = stage.parameters.rank_of(name)
    own = stage.parameters.by_name[name].detach().clone() if owner == stage.rank else None
    value: Tensor = stage.group.broadcast(own, root=owner)
    return value


def _plain(value_ids: Iterable[ValueId]) -> list[tuple[Any, ...]]:
    return [tuple(value_id) for value_id in sorted(value_ids)]


def _encoded_call(number: int, call: UnitCall, produced: dict[ValueId, Tensor]) -> tuple[Any, ...]:
    leaves = [
        produced.get(ValueId(number, index, call.unit), leaf)
        for index, leaf in enumerate(call.leaves)
    ]
    example = example_of(call.structure, leaves)
    shapes = [encode_leaf(leaf) for leaf in call.leaves]
    return (call.unit, call.chunk, example, call.attributes, shapes, call.needs_grad)


def _decoded_call(encoded: tuple[Any, ...]) -> UnitCall:
    unit, chunk, example, attributes, shapes, needs_grad = encoded
    leaves = [decode_leaf(leaf) for leaf in shapes]
    return UnitCall(unit, chunk, structure_of(example), attributes, leaves, set(needs_grad))

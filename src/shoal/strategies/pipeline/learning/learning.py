"""How ranks find out the way through a model: one micro-batch, one chunk after the other.

Whoever has the chunk walks, and the others attend: they answer when a parameter of theirs is asked
for, and get what the walk returned. Afterwards all of them have the same `Itinerary`. Random
numbers, buffers and what modules keep in attributes are afterwards as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.layers.module_snapshot import Snapshot
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, Learner, Source
from shoal.strategies.pipeline.learning.attributes import tensors_in
from shoal.strategies.pipeline.learning.chunk_forward import LearningWalk
from shoal.strategies.pipeline.learning.route import Call, Itinerary, Root, Shape
from shoal.strategies.pipeline.learning.unit_results import example_of, structure_of
from shoal.strategies.pipeline.stages.stage import Stage
from shoal.strategies.pipeline.stages.units import Unit
from shoal.torch_support.random_state import RandomState


def learn(stage: Stage, call: Callable[[], Any]) -> Itinerary:
    """The way of one kind of input; ``call`` calls the model. All ranks call it together."""
    itinerary = Itinerary()
    values: dict[Root, Tensor] = {}
    _share_trainability(stage)
    with _unchanged(stage.module):
        for chunk in range(stage.num_chunks):
            if stage.is_own(chunk):
                record = _Exploration(stage, chunk, itinerary, values).report(call)
            else:
                record = _attend(stage, stage.rank_of(chunk))
                itinerary.calls += [_decoded_call(*call) for call in record["calls"]]
            values |= {tuple(root): value for root, value in record["values"]}
            itinerary.wanted[chunk] = [tuple(root) for root in record["wanted"]]
            itinerary.overwritten[chunk] = {tuple(root) for root in record["overwritten"]}
            for number, leaf in record["rewritten"]:
                itinerary.calls[number].rewritten.add(leaf)
            borrowed = itinerary.borrowed.setdefault(stage.rank_of(chunk), [])
            borrowed += [name for name in record["borrowed"] if name not in borrowed]
    return itinerary


def _share_trainability(stage: Stage) -> None:
    """Everybody knows which parameters of others want gradients."""
    parameters = stage.parameters
    own = {n: p.requires_grad for n, p in parameters.by_name.items() if parameters.is_own(n)}
    for trainable in stage.group.all_gather_object(own):
        for name, is_trainable in trainable.items():
            if not parameters.is_own(name):
                parameters.by_name[name].requires_grad_(is_trainable)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Random numbers, buffers and attributes are afterwards as before: nothing was trained yet."""
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
    """Buffers and tensors in attributes, as far as forward may write into them."""
    for tensor in (*module.buffers(), *tensors_in(module).values()):
        is_here = tensor.layout is torch.strided and not isinstance(tensor, AbsentValue)
        if is_here and 0 not in tensor.stride() and not tensor.is_inference():
            yield tensor


class _Exploration:
    """A walk through one chunk that this rank has."""

    def __init__(
        self, stage: Stage, chunk: int, itinerary: Itinerary, values: dict[Root, Tensor]
    ) -> None:
        self._stage, self._chunk = stage, chunk
        self._itinerary, self._values = itinerary, values
        self._fetched: dict[str, Tensor] = {}
        self._learner = Learner(self._fetch)

    def report(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Walks, and tells everybody."""
        itinerary, first = self._itinerary, len(self._itinerary.calls)
        walk = LearningWalk(
            self._stage.path,
            self._chunk,
            self._stage.num_chunks,
            itinerary,
            self._values,
            self._learner,
            self._borrow,
        )
        with self._hidden_parameters():
            walk.run(call, ())
        used = sorted(self._learner.used)
        rewritten = walk.rewritten()
        record = {
            "calls": [
                _encoded_call(call, _leaves(walk, number, call))
                for number, call in enumerate(itinerary.calls[first:], first)
            ],
            "values": list(walk.produced.items()),
            "wanted": [(source.call, source.leaf) for source in used if source.call >= 0],
            "overwritten": [root[1:] for root in rewritten if root[0] == "in"],
            "rewritten": [root for root in rewritten if root[0] != "in"],
            "borrowed": self._borrowed(walk),
        }
        self._stage.group.broadcast_object(("done", record), root=self._stage.rank)
        return record

    def _borrowed(self, walk: LearningWalk) -> list[str]:
        parameters = self._stage.parameters
        names = {name for unit in walk.units for name in parameters.own_names(unit.module)}
        names |= {source.name for source in self._learner.used if source.call < 0}
        return [
            name for name in parameters.by_name if name in names and not parameters.is_own(name)
        ]

    @contextmanager
    def _hidden_parameters(self) -> Iterator[None]:
        """Parameters of others are absent, with their values within reach."""
        parameters = self._stage.parameters
        foreign = [name for name in parameters.by_name if not parameters.is_own(name)]
        for name in foreign:
            parameter = parameters.by_name[name]
            shadow = torch.empty_like(parameter, device="meta")
            source = frozenset([Source(-1, 0, name)])
            value = AbsentValue(shadow, parameter.device, source, self._learner)
            parameters.show(name, value.requires_grad_(parameter.requires_grad))
        try:
            yield
        finally:
            for name in foreign:
                parameters.show_absent(name)

    def _borrow(self, unit: Unit) -> None:
        """A unit of another rank is going to run here."""
        parameters = self._stage.parameters
        for name in parameters.own_names(unit.module):
            if not parameters.is_own(name):
                value = self._fetch(name).detach()
                parameters.show(name, value.requires_grad_(parameters.by_name[name].requires_grad))

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


def _attend(stage: Stage, explorer: int) -> dict[str, Any]:
    """Answers until another rank has walked; returns what it reports."""
    while True:
        what, content = stage.group.broadcast_object(root=explorer)
        if what == "done":
            report: dict[str, Any] = content
            return report
        _broadcast_parameter(stage, content)


def _broadcast_parameter(stage: Stage, name: str) -> Tensor:
    owner = stage.parameters.rank_of(name)
    own = stage.parameters.by_name[name].detach().clone() if owner == stage.rank else None
    value: Tensor = stage.group.broadcast(own, root=owner)
    return value


def _leaves(walk: LearningWalk, number: int, call: Call) -> list[Any]:
    """What a call returned and left, tensors included."""
    return [walk.produced.get((number, place), leaf) for place, leaf in enumerate(call.leaves)]


def _encoded_call(call: Call, leaves: list[Any]) -> tuple[Any, ...]:
    example = example_of(call.skeleton, leaves)
    shapes = [encode_leaf(leaf) for leaf in call.leaves]
    return (call.unit, call.chunk, example, call.left, shapes, call.needs_grad)


def _decoded_call(
    unit: str, chunk: int, example: Any, left: list[str], shapes: list[Any], needs_grad: set[int]
) -> Call:
    decoded = [decode_leaf(leaf) for leaf in shapes]
    return Call(unit, chunk, structure_of(example), left, decoded, set(needs_grad), set())


def encode_leaf(leaf: Any) -> Any:
    """A shape as plain data that needs no pickle."""
    if isinstance(leaf, Shape):
        return ("shape", list(leaf.size), str(leaf.dtype).removeprefix("torch."))
    return ("other", leaf, "")


def decode_leaf(encoded: Any) -> Any:
    """The inverse."""
    kind, content, dtype = encoded
    return Shape(tuple(content), getattr(torch, dtype)) if kind == "shape" else content

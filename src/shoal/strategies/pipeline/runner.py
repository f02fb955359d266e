"""Runs the ticks of one rank for one batch: receives, computes, sends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.comm.work import Work
from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.chunk_forward import ChunkForward
from shoal.strategies.pipeline.learning.route import (
    Route,
    Shapes,
    ValueId,
    decode_leaf,
    encode_leaf,
)
from shoal.strategies.pipeline.schedules import Pass, Span, Tick
from shoal.strategies.pipeline.split_backward import SplitBackward
from shoal.strategies.pipeline.stage import Stage

if TYPE_CHECKING:
    from shoal.strategies.engine.passes import Passes
    from shoal.strategies.recomputation.stores.peer_store import PeerStore


class LinkMessage(IntEnum):
    """What a message between two chunks carries; each kind has a tag of its own."""

    VALUES = 0
    GRADIENTS = 1
    SHAPES = 2


class StageLinks:
    """What one rank sends to and receives from the chunks of all ranks, its own included.

    Sends return at once, since the receiver may take the message much later.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage, self._group, self._rank = stage, stage.group, stage.rank
        self._pending: list[Work[Any]] = []
        self._local: dict[int, list[list[Tensor | None]]] = {}
        """Messages from this rank to itself, by tag."""

    def _tag(self, kind: LinkMessage, source: int, target: int) -> int:
        return (source * self._stage.num_chunks + target) * len(LinkMessage) + kind

    def send(
        self, kind: LinkMessage, source: int, target: int, values: list[Tensor | None]
    ) -> None:
        """Sends from chunk to chunk; None arrives as None."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[target]
        if peer == self._rank:
            self._local.setdefault(tag, []).append(values)
            return
        for work in [work for work in self._pending if work.is_done()]:
            work.wait()  # raises its error
            self._pending.remove(work)
        for value in values:
            # Has one dimension more in front, of length 1, or 0 for None.
            if value is None:  # NCCL takes nothing from the CPU
                message = torch.empty(0, 0, device=self._group.device)
            else:
                message = value.detach().unsqueeze(0)
            self._pending.append(self._group.start_send(message, peer, tag))

    def receive(self, kind: LinkMessage, source: int, target: int, count: int) -> list[Any]:
        """Waits for the next message of a kind: ``count`` tensors, or None where None was sent."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[source]
        if peer == self._rank:
            return self._local[tag].pop(0)
        messages = [self._group.recv(src=peer, tag=tag) for _ in range(count)]
        return [message.squeeze(0) if message.shape[0] else None for message in messages]

    def send_object(self, kind: LinkMessage, source: int, target: int, value: Any) -> None:
        """Sends plain data to a chunk of another rank."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[target]
        data = self._group.encode_message(value, peer, tag)
        self._pending.append(self._group.start_send(data, peer, tag))

    def receive_object(self, kind: LinkMessage, source: int, target: int) -> Any:
        """Waits for what `send_object` sent."""
        peer = self._stage.rank_of_chunk[source]
        return self._group.recv_object(peer, self._tag(kind, source, target))

    def finish(self) -> None:
        """Waits until everything was received."""
        while self._pending:
            self._pending.pop().wait()


_MESSAGES = {Pass.FORWARD: LinkMessage.VALUES, Pass.BACKWARD: LinkMessage.GRADIENTS}


class _Arrival(torch.autograd.Function):
    """Lets a value that came from another rank into a graph; its gradient goes to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _anchor(value: Tensor) -> Tensor:
    """Of the same shape, for a gradient, and without memory of its own."""
    return value.new_empty(()).expand(value.shape).requires_grad_()


@dataclass
class _InFlight:
    """What a micro-batch keeps in a chunk from its forward to its last backward.

    None of it is the memory of an activation: that is the graph's to keep, or to give away.
    """

    arrived: dict[ValueId, Tensor]
    produced: dict[ValueId, GradientEdge]
    loss: Tensor | None
    halves: SplitBackward | None = None


class Runner:
    """Runs one rank's ticks for one batch."""

    def __init__(
        self,
        passes: Passes,
        stage: Stage,
        routes: Sequence[tuple[Route, str]],
        call_model: Callable[[int], Any],
        loss: Callable[[int, Any], Tensor],
        *,
        delays_weights: bool = False,
    ) -> None:
        """Nothing runs yet.

        Args:
            passes: The model's, which average gradients over the data axis.
            stage: This rank's.
            routes: For each micro-batch its route and the size of its inputs.
            call_model: Calls the module with a micro-batch, given its number.
            loss: The scaled loss of a micro-batch, from its number and the model's output.
            delays_weights: Whether the gradients of weights have ticks of their own.
        """
        self._passes, self._stage, self._routes = passes, stage, routes
        self._call_model, self._loss = call_model, loss
        self._delays_weights = delays_weights
        self._links = StageLinks(stage)
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self.spans: list[Span] = []
        self.store: PeerStore | None = None
        self.holders: Mapping[tuple[int, int], int] = {}
        """Who keeps the activations of a chunk and a micro-batch, where it is another rank."""

    def run(self, ticks: Sequence[Tick], *, averages: bool) -> None:
        """Runs all ticks; ``averages``: the last is a backward that also averages gradients."""
        passes, last = self._passes, len(ticks) - 1
        auto_sync = passes.auto_sync
        try:
            for number, tick in enumerate(ticks):
                passes.auto_sync = averages and number == last
                self._run_tick(tick)
        finally:
            passes.auto_sync = auto_sync
        self._links.finish()

    def _run_tick(self, tick: Tick) -> None:
        received = self._receive(tick)
        start = time.perf_counter()
        key = (tick.chunk, tick.micro_batch)
        if tick.kind is Pass.FORWARD:
            with self._kept_by(self.holders.get(key)):
                self._in_flight[key] = self._forward(tick, received)
        elif tick.kind is Pass.BACKWARD:
            self._backward(tick, self._in_flight[key], received)
            if not self._delays_weights:
                del self._in_flight[key]
        else:
            halves = self._in_flight.pop(key).halves
            assert halves is not None
            halves.to_weights()
        self.spans.append(Span(self._stage.rank, tick, start, time.perf_counter()))

    @contextlib.contextmanager
    def _kept_by(self, holder: int | None) -> Iterator[None]:
        """Inside, what blocks keep goes to another rank, or stays here."""
        if self.store is None:
            yield
            return
        self.store.holder = holder
        try:
            yield
        finally:
            self.store.holder = None

    def _receive(self, tick: Tick) -> dict[ValueId, Tensor]:
        """What a tick needs of other chunks; gradients of a value used in several are summed."""
        route, _ = self._routes[tick.micro_batch]
        found: dict[ValueId, Tensor] = {}
        for source, ids in route.receives[tick.kind, tick.chunk].items():
            values = self._links.receive(_MESSAGES[tick.kind], source, tick.chunk, len(ids))
            for value_id, value in zip(ids, values, strict=True):
                if value is not None:
                    found[value_id] = found[value_id] + value if value_id in found else value
        return found

    def _send(self, tick: Tick, values: Mapping[ValueId, Tensor | None]) -> None:
        """What other chunks need of a tick."""
        route, _ = self._routes[tick.micro_batch]
        for target, ids in route.sends[tick.kind, tick.chunk].items():
            sent = [values[value_id] for value_id in ids]
            self._links.send(_MESSAGES[tick.kind], tick.chunk, target, sent)

    # Forward ----------------------------------------------------------------------------------

    def _forward(self, tick: Tick, received: Mapping[ValueId, Tensor]) -> _InFlight:
        """One micro-batch through one chunk."""
        route, size = self._routes[tick.micro_batch]
        chunk, has_grad = tick.chunk, torch.is_grad_enabled()
        anchors = {
            value_id: _anchor(value)
            for value_id, value in received.items()
            if has_grad and value_id in route.needs_grad
        }
        overwritten = route.overwritten[chunk]
        shown = {
            value_id: value.clone() if value_id in overwritten else value
            for value_id, value in _let_in(anchors, received).items()
        }
        shapes = self._receive_shapes(route, size, chunk)
        forward = ChunkForward(
            self._stage, chunk, route.calls, shown, shapes, route.exported[chunk]
        )
        output = forward.run(self._call_model, tick.micro_batch)
        self._announce_shapes(route, size, chunk, forward.shapes)
        produced = forward.produced
        _check_gradients(route, produced)
        loss = None
        if chunk == self._stage.num_chunks - 1:
            with self._stage.interceptor.in_loss():
                loss = self._loss(tick.micro_batch, output)
        self._send(tick, produced)
        self._passes.expect_backward(list(produced.values()))
        differentiable = {n: value for n, value in produced.items() if n in route.needs_grad}
        edges = {n: get_gradient_edge(value) for n, value in differentiable.items()}
        return _InFlight(anchors, edges, loss)

    def _receive_shapes(self, route: Route, size: str, chunk: int) -> Shapes:
        """What the calls of earlier chunks return, for inputs of this size."""
        if chunk == 0:
            return ()
        if (chunk - 1, size) not in route.shapes:
            encoded = self._links.receive_object(LinkMessage.SHAPES, chunk - 1, chunk)
            shapes = [[decode_leaf(leaf) for leaf in call] for call in encoded]
            route.shapes[chunk - 1, size] = shapes
        return route.shapes[chunk - 1, size]

    def _announce_shapes(self, route: Route, size: str, chunk: int, shapes: Shapes) -> None:
        """Tells the next chunk what calls return, once for each size of the inputs."""
        stage = self._stage
        if chunk == stage.num_chunks - 1:
            return
        known = route.shapes.setdefault((chunk, size), shapes)
        if known is shapes:
            if stage.rank_of_chunk[chunk + 1] != stage.rank:
                encoded = [[encode_leaf(leaf) for leaf in call] for call in shapes]
                self._links.send_object(LinkMessage.SHAPES, chunk, chunk + 1, encoded)
        elif known != shapes:
            calls = zip(route.calls, known, shapes, strict=False)
            units = [call.unit for call, one, other in calls if one != other]
            raise ShoalError(
                f"the shapes that {', '.join(units)} returned differ between micro-batches of one "
                "size: shapes between the units of a pipeline must not depend on the numbers in a "
                "batch"
            )

    # Backward ---------------------------------------------------------------------------------

    def _backward(
        self, tick: Tick, in_flight: _InFlight, received: Mapping[ValueId, Tensor]
    ) -> None:
        tensors: list[Any] = [in_flight.produced[value_id] for value_id in received]
        gradients: list[Tensor | None] = list(received.values())
        if in_flight.loss is not None:
            tensors.append(in_flight.loss)
            gradients.append(None)
        if self._delays_weights:
            in_flight.halves = SplitBackward(tensors, gradients, list(in_flight.arrived.values()))
            in_flight.halves.to_inputs()
        elif tensors:
            torch.autograd.backward(tensors, gradients)
        gradients_of = {value_id: anchor.grad for value_id, anchor in in_flight.arrived.items()}
        self._send(tick, gradients_of)
        in_flight.arrived, in_flight.produced, in_flight.loss = {}, {}, None


def _let_in(
    anchors: Mapping[ValueId, Tensor], received: Mapping[ValueId, Tensor]
) -> dict[ValueId, Tensor]:
    """Values that arrived, at the beginning of a graph where they want a gradient."""
    shown: dict[ValueId, Tensor] = {}
    for value_id, value in received.items():
        value = value.detach()
        if value_id in anchors:
            value = _Arrival.apply(anchors[value_id], value)  # type: ignore[no-untyped-call]
        shown[value_id] = value
    return shown


def _check_gradients(route: Route, produced: Mapping[ValueId, Tensor]) -> None:
    for value_id, value in produced.items():
        if value.requires_grad and value_id not in route.needs_grad:
            raise ShoalError(
                f"what {value_id.name} returned wants a gradient, which it did not when the route "
                "through the model was learned"
            )

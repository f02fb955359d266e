"""Walks a schedule on one rank: receives, computes, sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.chunk_forward import Walk
from shoal.strategies.pipeline.learning.learning import decode_leaf, encode_leaf
from shoal.strategies.pipeline.learning.route import Itinerary, Root
from shoal.strategies.pipeline.running.links import GRADIENTS, SHAPES, VALUES, Mail
from shoal.strategies.pipeline.running.split_backward import SplitBackward
from shoal.strategies.pipeline.schedule.simulation import Span
from shoal.strategies.pipeline.schedule.tick import Pass, Tick
from shoal.strategies.pipeline.stages.stage import Stage


@dataclass
class Route:
    """A way through the model, and the shapes on it that are known so far.

    Attributes:
        itinerary: The way.
        shapes: What earlier chunks' calls return, by chunk and size of the inputs.
        announced: What this rank's chunks told the next ones.
    """

    itinerary: Itinerary
    shapes: dict[tuple[int, str], list[list[Any]]] = field(default_factory=dict)
    announced: dict[tuple[int, str], list[list[Any]]] = field(default_factory=dict)


@dataclass
class _Passage:
    """A micro-batch in a chunk, from its forward to its backward."""

    arrived: dict[Root, Tensor]
    produced: dict[Root, Tensor]
    loss: Tensor | None = None
    halves: SplitBackward | None = None


@dataclass(frozen=True)
class Jobs:
    """What a runner does at its ticks.

    Attributes:
        call: Calls the model with a micro-batch.
        loss: The scaled loss of a micro-batch, from the model's output.
        watch: Tells the engine which tensors a backward will begin with.
        holding_back: Around backwards after which gradients are not averaged yet.
    """

    call: Callable[[int], Any]
    loss: Callable[[int, Any], Tensor]
    watch: Callable[[Sequence[Tensor]], None]
    holding_back: Callable[[], AbstractContextManager[None]]


class Runner:
    """One rank's work for one batch."""

    def __init__(self, stage: Stage, routes: Sequence[tuple[Route, str]], jobs: Jobs) -> None:
        """``routes`` has for each micro-batch its way, and its size."""
        self._stage, self._routes, self._jobs = stage, routes, jobs
        self._mail = Mail(stage)
        self._passages: dict[tuple[int, int], _Passage] = {}
        self.spans: list[Span] = []

    def run(self, ticks: Sequence[Tick], *, averages: bool) -> None:
        """Walks the schedule; ``averages``: the last backward also averages the gradients."""
        last = max((n for n, tick in enumerate(ticks) if tick.work is Pass.BACKWARD), default=-1)
        is_split = any(tick.work is Pass.WEIGHTS for tick in ticks)
        for number, tick in enumerate(ticks):
            received = self._collect(tick)
            begin = time.perf_counter()
            may_average = averages and number == last and not is_split
            with nullcontext() if may_average else self._jobs.holding_back():
                self._work(tick, received, is_split)
            self.spans.append(Span(self._stage.rank, tick, begin, time.perf_counter()))
        self._mail.finish()

    def _work(self, tick: Tick, received: Mapping[Root, Any], is_split: bool) -> None:
        key = (tick.chunk, tick.micro_batch)
        if tick.work is Pass.FORWARD:
            self._passages[key] = self.forward(tick, received)
        elif tick.work is Pass.BACKWARD:
            self._backward(tick, self._passages[key], received, is_split)
            if not is_split:
                del self._passages[key]
        else:
            halves = self._passages.pop(key).halves
            assert halves is not None
            halves.to_weights()

    # Mail -------------------------------------------------------------------------------------

    def _messages(self, tick: Tick) -> list[tuple[int, int, int, list[Root]]]:
        """What a tick needs from elsewhere: kind, source, target, and the values concerned."""
        itinerary = self._routes[tick.micro_batch][0].itinerary
        chunk = tick.chunk
        if tick.work is Pass.FORWARD:
            incoming = itinerary.incoming(chunk).items()
            return [(VALUES, source, chunk, roots) for source, roots in incoming]
        if tick.work is Pass.WEIGHTS:
            return []
        return [
            (GRADIENTS, target, chunk, wanted)
            for target, roots in itinerary.outgoing(chunk).items()
            if (wanted := [root for root in roots if itinerary.needs_grad(root)])
        ]

    def _collect(self, tick: Tick) -> dict[Root, Any]:
        """Values by root; for gradients the sum over those who used a value."""
        found: dict[Root, Any] = {}
        for kind, source, target, roots in self._messages(tick):
            values = self._mail.receive(kind, source, target, len(roots))
            for root, value in zip(roots, values, strict=True):
                if value is not None:
                    found[root] = value if root not in found else found[root] + value
        return found

    # Forward ----------------------------------------------------------------------------------

    def forward(self, tick: Tick, received: Mapping[Root, Tensor]) -> _Passage:
        """One micro-batch through one chunk; what others need is sent."""
        route, size = self._routes[tick.micro_batch]
        itinerary, chunk = route.itinerary, tick.chunk
        arrived = {root: self._leaf(itinerary, root, value) for root, value in received.items()}
        overwritten = itinerary.overwritten.get(chunk, set())
        shown = {
            root: value.clone() if root in overwritten else value for root, value in arrived.items()
        }
        walk = Walk(self._stage.path, chunk, self._stage.num_chunks, itinerary, shown)
        shapes = self._shapes(route, size, chunk)
        output = walk.run(lambda: self._jobs.call(tick.micro_batch), shapes)
        self._announce(route, size, chunk, walk.shapes)
        self._check_gradients(itinerary, walk)
        passage = _Passage(arrived, walk.produced)
        if chunk == self._stage.num_chunks - 1:
            with self._stage.path.in_loss():
                passage.loss = self._jobs.loss(tick.micro_batch, output)
        for target, roots in itinerary.outgoing(chunk).items():
            self._mail.send(VALUES, chunk, target, [walk.produced[root] for root in roots])
        self._jobs.watch([value for value in walk.produced.values() if value.requires_grad])
        passage.produced = {
            root: value for root, value in walk.produced.items() if itinerary.needs_grad(root)
        }
        return passage

    def _leaf(self, itinerary: Itinerary, root: Root, value: Tensor) -> Tensor:
        needs_grad = itinerary.needs_grad(root) and torch.is_grad_enabled()
        return value.detach().requires_grad_(needs_grad)

    def _check_gradients(self, itinerary: Itinerary, walk: Walk) -> None:
        for root, value in walk.produced.items():
            if value.requires_grad and not itinerary.needs_grad(root):
                raise ShoalError(
                    f"what {itinerary.calls[root[0]].unit} returned wants a gradient, which it did "
                    "not when the way through the model was learned"
                )

    def _shapes(self, route: Route, size: str, chunk: int) -> list[list[Any]]:
        """What earlier chunks' calls return for inputs of this size."""
        if chunk == 0:
            return []
        if (chunk, size) not in route.shapes:
            encoded = self._mail.receive_object(SHAPES, chunk - 1, chunk)
            decoded = [[decode_leaf(leaf) for leaf in call] for call in encoded]
            route.shapes[chunk, size] = decoded
        return route.shapes[chunk, size]

    def _announce(self, route: Route, size: str, chunk: int, shapes: list[list[Any]]) -> None:
        """Tells the next chunk, once for each size of the inputs."""
        if chunk == self._stage.num_chunks - 1:
            return
        known = route.announced.setdefault((chunk, size), shapes)
        if known is shapes:
            encoded = [[encode_leaf(leaf) for leaf in call] for call in shapes]
            self._mail.send_object(SHAPES, chunk, chunk + 1, encoded)
        elif known != shapes:
            units = [call.unit for call in route.itinerary.calls]
            odd = [u for u, one, other in zip(units, known, shapes, strict=False) if one != other]
            raise ShoalError(
                f"the shapes that {', '.join(odd)} returned differ between micro-batches of one "
                "size: shapes between the units of a pipeline must not depend on the numbers in a "
                "batch"
            )

    # Backward ---------------------------------------------------------------------------------

    def _backward(
        self, tick: Tick, passage: _Passage, received: Mapping[Root, Tensor], is_split: bool
    ) -> None:
        tensors = [passage.produced[root] for root in received]
        gradients: list[Tensor | None] = list(received.values())
        if passage.loss is not None:
            tensors.append(passage.loss)
            gradients.append(None)
        if is_split:
            passage.halves = SplitBackward(tensors, gradients, list(passage.arrived.values()))
            passage.halves.to_inputs()
        elif tensors:
            torch.autograd.backward(tensors, gradients)
        self._return_gradients(tick, passage)
        passage.produced, passage.loss = {}, None

    def _return_gradients(self, tick: Tick, passage: _Passage) -> None:
        itinerary = self._routes[tick.micro_batch][0].itinerary
        for source, roots in itinerary.incoming(tick.chunk).items():
            wanted = [root for root in roots if itinerary.needs_grad(root)]
            if wanted:
                gradients = [passage.arrived[root].grad for root in wanted]
                self._mail.send(GRADIENTS, tick.chunk, source, gradients)
        passage.arrived = {}

"""One model's pipeline on one rank: learns the ways through the model and sends batches along."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.strategies.pipeline.learning.input_kinds import agree, kind_of, mode_of
from shoal.strategies.pipeline.learning.learning import learn
from shoal.strategies.pipeline.learning.route import Itinerary
from shoal.strategies.pipeline.running.borrowed_parameters import Loans
from shoal.strategies.pipeline.running.losses import Losses
from shoal.strategies.pipeline.running.micro_batches import MicroBatch, count_parts, split
from shoal.strategies.pipeline.running.no_backward import without_backward
from shoal.strategies.pipeline.running.random_stream import own_stream
from shoal.strategies.pipeline.running.results import spread
from shoal.strategies.pipeline.running.runner import Jobs, Route, Runner
from shoal.strategies.pipeline.schedule.schedules import make_schedule
from shoal.strategies.pipeline.schedule.simulation import Span
from shoal.strategies.pipeline.schedule.tick import Pass, Tick
from shoal.strategies.pipeline.stages.stage import Stage
from shoal.strategies.training import LossFunction, call_module

if TYPE_CHECKING:
    from shoal.strategies.model import ShardedModel


@dataclass(frozen=True)
class Work:
    """How a batch is worked on.

    Attributes:
        schedule: Its name.
        micro_batches: Parts of a batch.
        chunks: Parts of the model on each rank.
    """

    schedule: str
    micro_batches: int
    chunks: int


class Pipeline:
    """The pipeline of one model, on one rank."""

    def __init__(self, model: ShardedModel, stage: Stage, work: Work) -> None:
        """``model`` holds the stage's parameters for the data axis."""
        self._model, self.stage, self.work = model, stage, work
        self.loans = Loans(stage)
        self.spans: list[Span] = []
        self.last_itinerary: Itinerary | None = None
        self._routes: dict[tuple[str, str, str], Route] = {}
        self._keeps_loans = self._has_loans = False

    # Training -----------------------------------------------------------------------------------

    def train(self, inputs: Any, targets: Any, loss_fn: LossFunction, weight: float) -> Tensor:
        """Forward and backward of one batch; returns the mean loss over the global batch."""
        count = count_parts(inputs, self.work.micro_batches, self._model.data_group)
        batches = split(inputs, targets, count)
        with torch.enable_grad(), own_stream(self.stage.group.rank):
            call = partial(self._call, batches)
            parts = [batch.inputs for batch in batches]
            routes = self._find_routes(parts, call, (inputs, targets))
            losses = Losses(batches, loss_fn, weight, self._model.data_group)
            jobs = Jobs(call, losses.scaled, self._watch, self._model.no_sync)
            runner = Runner(self.stage, routes, jobs)
            self._run(runner, routes[0][0].itinerary, len(batches))
        self.spans = runner.spans
        return losses.mean(self.stage)

    def _run(self, runner: Runner, itinerary: Itinerary, count: int) -> None:
        engine = self._model.engine
        self.loans.hand_out(itinerary)
        ticks = make_schedule(self.work.schedule, self.stage.group.size, count, self.work.chunks)
        own = ticks[self.stage.rank]
        is_split = any(tick.work is Pass.WEIGHTS for tick in own)
        waits = is_split or self.loans.lends_trainable(itinerary)
        num_rounds = engine.num_rounds
        with engine.batch_in_parts():
            runner.run(own, averages=engine.auto_sync and not waits)
        returned = self.loans.hand_back(itinerary)
        if returned:
            parameters, gradients = zip(*returned, strict=True)
            with self._model.no_sync():
                torch.autograd.backward(parameters, gradients)
        # The last backward may also end in front of a frozen chunk, or have nothing to begin with.
        if engine.auto_sync and engine.num_rounds == num_rounds:
            engine.average_late()

    def _call(self, batches: Sequence[MicroBatch], number: int) -> Any:
        return call_module(self.stage.module, self.stage.module, batches[number].inputs)

    def _watch(self, tensors: Sequence[Tensor]) -> None:
        self._model.engine.expect_backward(tensors)

    # Ways ---------------------------------------------------------------------------------------

    def _find_routes(
        self, inputs: Sequence[Any], call: Callable[[int], Any], batch: Any
    ) -> list[tuple[Route, str]]:
        """Each micro-batch's way, and its size; new ones are learned by calling the model.

        ``batch`` is what all ranks of the pipeline must have alike.
        """
        kinds = [kind_of(each) for each in inputs]
        wanted = agree(self.stage.group, kinds, self.stage.module, batch)
        mode = mode_of(self.stage.module)
        routes = []
        for number, kind in enumerate(kinds):
            key = (kind.structure, mode, wanted)
            if key not in self._routes:
                self.loans.withdraw()
                self._has_loans = False
                self._routes[key] = Route(learn(self.stage, partial(call, number)))
            routes.append((self._routes[key], kind.sizes))
        self.last_itinerary = routes[0][0].itinerary
        return routes

    # Prediction ---------------------------------------------------------------------------------

    def predict(self, args: Any, kwargs: Any, *, everywhere: bool) -> Any:
        """The model's output for a whole batch, on every rank or the last stage."""
        has_grad = torch.is_grad_enabled()
        # Inference mode does not tell who writes into what.
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            own_stream(self.stage.group.rank),
        ):
            output = self._pass_through(args, kwargs)
        if everywhere:
            output = spread(output, self.stage.group, is_here=self.stage.is_last)
        return without_backward(output) if has_grad else output

    def _pass_through(self, args: Any, kwargs: Any) -> Any:
        def call(_: int) -> Any:
            return self.stage.module(*args, **kwargs)

        def keep(_: int, output: Any) -> Tensor:
            found[0] = output
            return torch.zeros(())

        found: list[Any] = [None]
        routes = self._find_routes([(args, kwargs)], call, (args, kwargs))
        if not (self._keeps_loans and self._has_loans):
            self.loans.hand_out(routes[0][0].itinerary)
            self._has_loans = True
        runner = Runner(self.stage, routes, Jobs(call, keep, _ignore, self._model.no_sync))
        own = range(self.stage.rank, self.stage.num_chunks, self.stage.group.size)
        runner.run([Tick(Pass.FORWARD, 0, chunk) for chunk in own], averages=False)
        return found[0]

    @contextlib.contextmanager
    def keeping_loans(self) -> Iterator[None]:
        """Inside, borrowed parameters are fetched once."""
        self._keeps_loans, self._has_loans = True, False
        try:
            yield
        finally:
            self._keeps_loans = False

    # What there is ------------------------------------------------------------------------------

    def first_name(self, key: str) -> str:
        """The name under which a state's entry is held: tied parameters have several."""
        return self.stage.parameters.aliases.get(key, key)

    def rank_of_key(self, key: str) -> int:
        """Who has an entry of the model's state."""
        parameters, name = self.stage.parameters, self.first_name(key)
        if name in parameters.by_name:
            return parameters.rank_of(name)
        return parameters.buffers.get(name, 0) % self.stage.group.size

    def read_trace(self, rows: Sequence[Any]) -> list[Span]:
        """Spans of all ranks, from plain data."""
        return [
            Span(rank, Tick(Pass(work), number, chunk), start, stop)
            for spans in rows
            for rank, (work, number, chunk), start, stop in spans
        ]

    def describe(self) -> str:
        """A table: a line for each chunk."""
        parameters = self.stage.parameters
        lines = []
        for chunk in range(self.stage.num_chunks):
            units = [name for name, place in self.stage.places.items() if place == chunk]
            names = parameters.names_in(chunk)
            count = sum(parameters.by_name[name].numel() for name in names)
            span = units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]}"
            lines.append(f"stage {self.stage.rank_of(chunk)}, chunk {chunk}: {count:12,}  {span}")
        return "\n".join([*lines, *self._travels()])

    def _travels(self) -> Iterator[str]:
        itinerary = self.last_itinerary
        if itinerary is None:
            return
        for chunk in range(self.stage.num_chunks):
            for target, roots in itinerary.outgoing(chunk).items():
                names = ", ".join(itinerary.calls[root[0]].unit for root in roots)
                yield f"chunk {chunk} -> chunk {target}: what {names} returns"
        for rank, borrowed in sorted(itinerary.borrowed.items()):
            for name in borrowed:
                owner = self.stage.parameters.rank_of(name)
                yield f"stage {rank} borrows {name} from stage {owner}"


def _ignore(_: Sequence[Tensor]) -> None:
    """Without gradients there is no backward to expect."""

"""One model's pipeline on one rank: finds the routes of batches, and runs batches along them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.errors import ShoalError
from shoal.strategies.pipeline.balance import plan_holders
from shoal.strategies.pipeline.batch import (
    Losses,
    check_same_batch,
    count_parts,
    kind_of,
    mode_of,
    split,
)
from shoal.strategies.pipeline.borrowed_parameters import BorrowedParameters
from shoal.strategies.pipeline.learning.learning import learn
from shoal.strategies.pipeline.learning.route import Route, example_of, structure_of
from shoal.strategies.pipeline.runner import Runner
from shoal.strategies.pipeline.schedules import SCHEDULES, Pass, Span, Tick, make_ticks
from shoal.strategies.pipeline.stage import Stage
from shoal.strategies.recomputation.stores.peer_store import PeerStore
from shoal.strategies.training import LossFunction, call_module, count_items
from shoal.torch_internals.trees import tree_flatten, tree_map, tree_unflatten
from shoal.torch_support.random_state import RandomState

if TYPE_CHECKING:
    from shoal.strategies.model import ShardedModel

_SEED_STRIDE = 1_000_003


class Pipeline:
    """The pipeline of one model, on one rank."""

    def __init__(
        self, model: ShardedModel, stage: Stage, schedule: str, micro_batches: int, chunks: int
    ) -> None:
        """``chunks`` is the number of chunks on each rank; ``model`` has the stage's parameters."""
        self._model, self.stage = model, stage
        self.micro_batches = micro_batches
        self._schedule, self._chunks = schedule, chunks
        self.borrowed = BorrowedParameters(stage)
        self.spans: list[Span] = []
        self.last_route: Route | None = None
        self._routes: dict[tuple[str, str, str], Route] = {}
        self._keeps_borrowed = self._has_borrowed = False

    # Training -----------------------------------------------------------------------------------

    def train(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, weight: float | None
    ) -> Tensor:
        """Forward and backward of one batch; returns the mean loss over the global batch."""
        num_rows, data = count_items(inputs), self._model.engine.backend
        count = count_parts(num_rows, self.micro_batches, data)
        batches = split(inputs, targets, num_rows, count)
        module = self.stage.module

        def call_model(number: int) -> Any:
            return call_module(module, module, batches[number].inputs)

        with torch.enable_grad(), _own_random_stream(self.stage.rank):
            parts = [batch.inputs for batch in batches]
            routes = self._find_routes(parts, call_model, (inputs, targets))
            losses = Losses(batches, loss_fn, float(num_rows if weight is None else weight), data)
            self._run(routes, call_model, losses.scaled)
        return losses.mean(self.stage)

    def _run(
        self,
        routes: Sequence[tuple[Route, str]],
        call_model: Callable[[int], Any],
        loss: Callable[[int, Any], Tensor],
    ) -> None:
        """All ticks of this rank, and the average over the data axis."""
        passes, stage, route = self._model.engine.passes, self.stage, routes[0][0]
        ticks = make_ticks(self._schedule, stage.rank, stage.group.size, len(routes), self._chunks)
        delays_weights = SCHEDULES[self._schedule].delays_weights
        # The last tick also averages, unless weights are delayed: they come after it.
        averages = passes.auto_sync and not delays_weights
        if route.borrows:
            self.borrowed.exchange_values(route)
            averages = averages and not self.borrowed.awaits_gradients(route)
        num_rounds = passes.num_rounds
        runner = Runner(passes, stage, routes, call_model, loss, delays_weights=delays_weights)
        with passes.batch_in_parts(), self._balanced(runner, len(routes)):
            runner.run(ticks, averages=averages)
        self.spans = runner.spans
        returned = self.borrowed.return_gradients(route) if route.borrows else []
        if returned:
            parameters, gradients = zip(*returned, strict=True)
            with self._model.no_sync():
                torch.autograd.backward(parameters, gradients)
        # The last backward averages nothing if it reaches no parameter, as in a frozen chunk.
        if passes.auto_sync and passes.num_rounds == num_rounds:
            passes.average_late()

    @contextlib.contextmanager
    def _balanced(self, runner: Runner, micro_batches: int) -> Iterator[None]:
        """Inside, stages hold activations for each other; see [Note: balanced stages]."""
        store = self._model.recomputation and self._model.recomputation.store
        if not isinstance(store, PeerStore):
            yield
            return
        group = self.stage.group
        plans = plan_holders(self._schedule, group.size, micro_batches, self._chunks)
        runner.holders, runner.store = plans[group.rank], store
        store.settle()
        yield
        group.barrier()  # no rank leaves while others take back what it holds

    # Routes -------------------------------------------------------------------------------------

    def _find_routes(
        self, inputs: Sequence[Any], call_model: Callable[[int], Any], batch: Any
    ) -> list[tuple[Route, str]]:
        """Each micro-batch's route and the size of its inputs; unknown routes are learned.

        ``batch`` is what all ranks of the pipeline must have alike.
        """
        kinds = [kind_of(each) for each in inputs]
        trainable = check_same_batch(self.stage, kinds, batch)
        mode = mode_of(self.stage.module)
        routes = []
        for number, kind in enumerate(kinds):
            key = (kind.structure, mode, trainable)
            if key not in self._routes:
                self.borrowed.free()
                self._has_borrowed = False
                self._routes[key] = learn(self.stage, partial(call_model, number))
            routes.append((self._routes[key], kind.sizes))
        self.last_route = routes[0][0]
        return routes

    # Prediction ---------------------------------------------------------------------------------

    def predict(self, args: Any, kwargs: Any, *, everywhere: bool) -> Any:
        """The model's output for a whole batch, on every rank or on the last stage."""
        has_grad = torch.is_grad_enabled()
        # Not in inference mode: its tensors have no version counters, which show writes.
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            _own_random_stream(self.stage.rank),
        ):
            output = self._run_forward(args, kwargs)
        if everywhere:
            output = _spread(output, self.stage.group, is_here=self.stage.is_last)
        return _without_backward(output) if has_grad else output

    def _run_forward(self, args: Any, kwargs: Any) -> Any:
        """The model's output on the last stage, None on others."""
        outputs: list[Any] = []

        def call_model(_: int) -> Any:
            return self.stage.module(*args, **kwargs)

        def keep_output(_: int, output: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(())

        routes = self._find_routes([(args, kwargs)], call_model, (args, kwargs))
        if not (self._keeps_borrowed and self._has_borrowed):
            self.borrowed.exchange_values(routes[0][0])
            self._has_borrowed = True
        passes = self._model.engine.passes
        runner = Runner(passes, self.stage, routes, call_model, keep_output)
        own = range(self.stage.rank, self.stage.num_chunks, self.stage.group.size)
        runner.run([Tick(Pass.FORWARD, 0, chunk) for chunk in own], averages=False)
        return outputs[0] if outputs else None

    @contextlib.contextmanager
    def keeping_borrowed(self) -> Iterator[None]:
        """Inside, borrowed parameters are fetched once."""
        self._keeps_borrowed, self._has_borrowed = True, False
        try:
            yield
        finally:
            self._keeps_borrowed = False

    # Description --------------------------------------------------------------------------------

    def describe(self) -> str:
        """A line for each chunk with its parameters and units, then what travels."""
        stage = self.stage
        lines = []
        for chunk, rank in enumerate(stage.rank_of_chunk):
            units = [name for name, its_chunk in stage.chunk_of_unit.items() if its_chunk == chunk]
            names = stage.parameters.names_in(chunk)
            count = sum(stage.parameters.by_name[name].numel() for name in names)
            listed = units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]}"
            lines.append(f"stage {rank}, chunk {chunk}: {count:12,}  {listed}")
        return "\n".join([*lines, *self._describe_route()])

    def _describe_route(self) -> Iterator[str]:
        route = self.last_route
        if route is None:
            return
        for chunk in range(self.stage.num_chunks):
            for target, ids in route.sends[Pass.FORWARD, chunk].items():
                names = ", ".join(value_id.name for value_id in ids)
                yield f"chunk {chunk} -> chunk {target}: what {names} returns"
        for rank, borrowed in sorted(route.borrowed.items()):
            for name in borrowed:
                owner = self.stage.parameters.rank_of(name)
                yield f"stage {rank} borrows {name} from stage {owner}"


@contextlib.contextmanager
def _own_random_stream(rank: int) -> Iterator[None]:
    """Inside, this stage draws random numbers of its own.

    Ranks of a pipeline begin with the same seed, and layers on different ranks would drop the same
    elements. So for each batch one number is drawn from torch's generator, and each stage is seeded
    with that number and its rank. Seeding the generator again repeats the run.
    """
    base = int(torch.randint(2**40, ()))
    outside = RandomState.capture()
    torch.default_generator.manual_seed(base + _SEED_STRIDE * rank)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(base + _SEED_STRIDE * rank)
    try:
        yield
    finally:
        outside.restore()


def _spread(output: Any, group: Backend, *, is_here: bool) -> Any:
    """The last stage's output on every rank; ``is_here`` on the rank that has it."""
    root = group.size - 1
    if not is_here:
        leaves, example = group.broadcast_object(root=root)
        structure = structure_of(example)
    else:
        found, structure = tree_flatten(output)
        found = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in found]
        leaves = [
            None if isinstance(leaf, Tensor) and group.carries(leaf) else (leaf,) for leaf in found
        ]
        group.broadcast_object((leaves, example_of(structure, found)), root=root)
    values = []
    for number, leaf in enumerate(leaves):
        if leaf is not None:
            values.append(leaf[0])
            continue
        own = found[number] if is_here else None
        values.append(group.broadcast(own, root=root))
    return tree_unflatten(values, structure)


class _NoBackward(torch.autograd.Function):
    """The identity; the graph behind an output is spread over the ranks and has no backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ShoalError(
            "a pipelined model cannot be trained by loss.backward(), because its graph is spread "
            "over the ranks and its micro-batches must alternate: call "
            "model.train_step(inputs, targets, loss_fn) for forward and backward, on every rank"
        )


def _without_backward(output: Any) -> Any:
    """The same values; backward on them raises an error that names ``train_step``."""
    anchor = torch.zeros((), requires_grad=True)

    def guard(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return _NoBackward.apply(leaf, anchor) if is_float else leaf  # type: ignore[no-untyped-call]

    return tree_map(guard, output)

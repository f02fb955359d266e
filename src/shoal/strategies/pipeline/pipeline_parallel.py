"""`PipelineParallelModel`: each rank has some of the layers, micro-batches go from rank to rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.comm import Backend, Mesh, World
from shoal.strategies.layers.materialization import share_values
from shoal.strategies.model import ShardedModel, ranks_for
from shoal.strategies.pipeline.balance import plan_holders
from shoal.strategies.pipeline.pipeline import Pipeline
from shoal.strategies.pipeline.schedules import (
    Pass,
    Span,
    Tick,
    choose_chunks,
    make_ticks,
    peak_in_one_chunk,
)
from shoal.strategies.pipeline.stage import Stage
from shoal.strategies.pipeline.units import cut_chain, find_units
from shoal.strategies.recomputation.blocks import blocks_within
from shoal.strategies.recomputation.policy import Policy, parse_policy
from shoal.strategies.recomputation.recomputation import stop_caching
from shoal.strategies.recomputation.stores.keepers import Keepers
from shoal.strategies.settings import LEVELS, Ownership
from shoal.strategies.training import LossFunction
from shoal.torch_internals.modules import IncompatibleKeys


class PipelineParallelModel(ShardedModel):
    """A module of which each rank holds some layers.

    Batches are cut into micro-batches that go through the ranks one after the other, so that all
    of them work at once. Training is by `train_step`: a plain ``loss.backward()`` is refused.

    Example:
        >>> model = PipelineParallelModel(module, micro_batches=8, schedule="1f1b")
        >>> optimizer = PipelineParallelOptimizer(optimizer, model)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = model.train_step(inputs, targets, loss_fn)
        ...     optimizer.step()
    """

    strategy = "pipeline"
    settled: ClassVar[tuple[str, ...]] = ("gather_compression",)
    sharding = LEVELS[0]

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        pipeline: int | None = None,
        data: int | None = None,
        zero: int = 0,
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        chunks: int | None = None,
        cut: Sequence[str] | None = None,
        balance: Mapping[str, float] | None = None,
        outputs: str = "everywhere",
        mesh: Mesh | None = None,
        seed: int = 0,
        activations: str | Policy | None = None,
        memory: int | str | None = None,
        **options: Any,
    ) -> None:
        """Cuts the module; every rank starts from rank 0's values and keeps its layers.

        Args:
            module: The user's; what it has on the meta device is initialised here.
            world: The ranks; the current world by default.
            pipeline: How many stages; by default all ranks, or what ``data`` leaves.
            data: How many pipelines side by side, each with batches of its own.
            zero: What these shard among each other: 0 nothing, 1 optimizer state, 2 gradients
                as well, 3 parameters as well.
            micro_batches: Parts of a batch; by default four for each stage.
            schedule: The order of forward and backward passes, by a name of `SCHEDULES`.
            chunks: Parts of the model on each rank; by default what the schedule takes.
            cut: Names of the units that the second and the later chunks begin with.
            balance: What each unit costs, by name (see `measure_units`); by default its number of
                parameters.
            outputs: Which ranks get the result of ``model(inputs)``: "everywhere", or the "last"
                stage only.
            mesh: The axes, if they are laid out already, and ranks have the same values.
            seed: For the values of what is on the meta device.
            activations: What blocks keep for backward, and where; see `ShardedModel`.
            memory: For ``activations="auto"``: the bytes that this rank may use in all.
            options: As for `ShardedModel`, for the data axis.
        """
        backend = ranks_for(module, world)
        chunks = choose_chunks(schedule, chunks)
        _check_choices(zero, micro_batches, outputs)
        rest = backend.size // data if data and backend.size % data == 0 else backend.size
        stages = rest if pipeline is None else pipeline
        if mesh is None:
            mesh = Mesh(pipeline=stages, data=data, world=backend)
            share_values(module, mesh.group("pipeline"), seed)
        group = mesh.group("pipeline")
        num_chunks = group.size * chunks
        units = find_units(module, num_chunks)
        # What ranks weigh may differ, where layers are split in unequal parts.
        chunk_of_unit = backend.broadcast_object(cut_chain(units, num_chunks, cut, balance))
        stop_caching(module)
        # Before the stage intercepts the calls of units: a unit of another rank is not computed.
        count = micro_batches or 4 * group.size
        ticks = make_ticks(schedule, group.rank, group.size, count, chunks)
        has_room = any(plan_holders(schedule, group.size, count, chunks))
        self.keepers = Keepers(
            tensor=mesh.group("tensor"),
            in_flight=peak_in_one_chunk(ticks),
            part=group.rank,
            stages=group if has_room else None,
        )
        self._recompute(module, _within_units(module, activations, memory), memory)
        if self.recomputation is not None:
            _check_uncut(self.recomputation.blocks, [unit.name for unit in units])
        stage = Stage(module, group, num_chunks, units, chunk_of_unit)
        # Before ShardedModel's constructor, which reads the first two; after it, attributes that
        # the class does not know would be set on the user's module.
        self.sharding = LEVELS[zero]
        self.is_part = mesh.shape["pipeline"] * mesh.shape["tensor"] > 1
        self._all_ranks = backend
        self._keys = list(module.state_dict())
        self._outputs_everywhere = outputs == "everywhere"
        self.pipeline = Pipeline(self, stage, schedule, count, chunks)
        # After the keys were listed, before the engine takes over what is left.
        stage.parameters.release()
        super().__init__(
            module,
            mesh.group("data"),
            seed=seed,
            activations=activations,
            memory=memory,
            **options,
        )
        self.engine.ownership = Ownership((group,), other_layers=group)
        self.options |= {
            "pipeline": pipeline, "data": data, "zero": zero, "micro_batches": micro_batches,
            "schedule": schedule, "chunks": chunks, "cut": cut, "balance": balance,
            "outputs": outputs,
        }  # fmt: skip

    @property
    def all_ranks(self) -> Backend:
        """All ranks that have something of this model."""
        return self._all_ranks

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the values of a buffer."""
        return self.pipeline.stage.parameters.rank_of_key(name) == self.stage

    @property
    def stage(self) -> int:
        """This rank's number in its pipeline."""
        return self.pipeline.stage.rank

    @property
    def trace(self) -> list[Span]:
        """This rank's ticks in its last `train_step`, with their times."""
        return self.pipeline.spans

    def gather_trace(self) -> list[Span]:
        """The ticks of all ranks of the pipeline, with their times; all ranks call it together."""
        rows = self.pipeline.stage.group.all_gather_object(
            [(span.rank, tuple(span.tick), span.start, span.stop) for span in self.trace]
        )
        return [
            Span(rank, Tick(Pass(kind), number, chunk), start, stop)
            for spans in rows
            for rank, (kind, number, chunk), start, stop in spans
        ]

    # Passes -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the whole batch through all stages; ``outputs`` says which ranks get the result."""
        return self.pipeline.predict(args, kwargs, everywhere=self._outputs_everywhere)

    def train_step(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, *, weight: float | None = None
    ) -> Tensor:
        """Forward and backward of one batch in micro-batches; neither zeroes gradients nor steps.

        All ranks of a pipeline pass the same batch. Tensors with the batch's rows are cut.

        Args:
            inputs: What the module is called with. A tuple is expanded into arguments; a dict is
                passed as one argument unless its keys name forward's parameters.
            targets: The second argument of ``loss_fn``.
            loss_fn: ``loss_fn(output, targets)``, the mean over the items of a micro-batch.
            weight: The weight of this batch among those of other pipelines; by default its
                number of items. May be zero.

        Returns:
            The mean loss over the global batch, the same on every rank.
        """
        if self.uneven_rows:
            self.uneven_rows = 0  # the parts are weighted by their rows
        with torch.enable_grad():
            self.begin_forward()
        return self.pipeline.train(inputs, targets, loss_fn, weight)

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Inside, the parameters that one prediction gathered or borrowed are kept for the next."""
        with super().predicting(), self.pipeline.keeping_borrowed():
            yield

    # The whole model ----------------------------------------------------------------------------

    def own_parameters(self, *, keep_changes: bool) -> AbstractContextManager[None]:
        """Inside, the parameters of this stage are whole."""
        return super().whole_parameters(keep_changes=keep_changes)

    def own_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The averaged gradients of this stage's parameters, whole."""
        return super().full_gradients()

    @contextlib.contextmanager
    def whole_parameters(self, *, keep_changes: bool) -> Iterator[None]:
        """Inside, every rank has all parameters of all stages.

        All ranks make the same changes; those of the rank that has a layer are kept.
        """
        with self.own_parameters(keep_changes=keep_changes):
            parameters, group = self.pipeline.stage.parameters, self.pipeline.stage.group
            self.pipeline.borrowed.free()
            for name, parameter in parameters.by_name.items():
                own = parameter.detach() if parameters.is_own(name) else None
                value = group.broadcast(own, root=parameters.rank_of(name))
                if own is None:
                    parameters.restore(name, value)
            try:
                yield
            finally:
                parameters.remove_foreign()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's state under its own names, on every rank; all of them call it."""
        self.engine.steps.check()
        prefix = kwargs.pop("prefix", "")
        self.synchronize_buffers()
        with self.own_parameters(keep_changes=False):
            own = copy.deepcopy(self.module.state_dict(*args, **kwargs))
        parameters = self.pipeline.stage.parameters
        return {
            prefix + key: self._share(
                own.get(parameters.first_name(key)), parameters.rank_of_key(key)
            )
            for key in self._keys
        }

    def _share(self, value: Any, owner: int) -> Any:
        """The owner's value on every rank."""
        group = self.pipeline.stage.group
        is_carried = isinstance(value, Tensor) and group.carries(value)
        if group.broadcast_object(is_carried, root=owner):
            return group.broadcast(value if group.rank == owner else None, root=owner)
        return group.broadcast_object(value, root=owner)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the whole model's state; each rank takes what it has. Every rank calls it."""
        missing = [key for key in self._keys if key not in state_dict]
        unexpected = [key for key in state_dict if key not in set(self._keys)]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.module).__name__}: missing keys "
                f"{missing}, unexpected keys {unexpected}"
            )
        own = set(self.module.state_dict())
        with self.own_parameters(keep_changes=True):
            self.module.load_state_dict(
                {key: value for key, value in state_dict.items() if key in own}, strict=False
            )
        if not missing:
            self.engine.steps.is_torn = False
        return IncompatibleKeys(missing, unexpected)

    def full_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The averaged gradient of every parameter of all stages, whole on every rank."""
        parameters = self.pipeline.stage.parameters
        own = dict(self.own_gradients())
        for name in parameters.by_name:
            yield name, self._share(own.get(name), parameters.rank_of(name))

    def describe(self) -> str:
        """Which rank has which layers and how many parameters, what travels, what optimizers do."""
        return f"{self.pipeline.describe()}\n{super().describe()}"


def _within_units(
    module: nn.Module, activations: str | Policy | None, memory: int | str | None
) -> Policy | None:
    """Lists of modules are cut, also those inside of a block: then their members are blocks."""
    policy = parse_policy(activations, memory)
    uncut = [unit.name for unit in find_units(module, 0)]
    return None if policy is None else blocks_within(module, policy, uncut)


def _check_uncut(blocks: Iterable[str], units: Sequence[str]) -> None:
    """A block that is computed again is computed by one rank."""
    for block in blocks:
        inside = [unit for unit in units if unit.startswith(f"{block}.")]
        if inside:
            raise ValueError(
                f"activations: the pipeline cuts block {block!r} into {', '.join(inside)}, for "
                "want of other units, and parts of it may be on different ranks. Use fewer stages "
                "or chunks, or name blocks that are not cut: "
                'activations=shoal.activations.Policy("full", blocks=[...])'
            )


def _check_choices(zero: int, micro_batches: int | None, outputs: str) -> None:
    if zero not in range(len(LEVELS)):
        raise ValueError(f"zero must be 0, 1, 2 or 3; got {zero!r}")
    if micro_batches is not None and micro_batches < 1:
        raise ValueError(f"need at least one micro-batch; got micro_batches={micro_batches}")
    if outputs not in ("everywhere", "last"):
        raise ValueError(f'outputs must be "everywhere" or "last"; got {outputs!r}')

"""`HybridShardedModel`: data, tensor and pipeline parallelism in one mesh.

Layers are split over the tensor axis, what is then left of the model is cut into stages over the
pipeline axis, and what a rank has of its stage is shared with the ranks of the data axis, as
data-parallel strategies share a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.comm import Backend, Mesh, World
from shoal.comm.world import find_current
from shoal.sharding.split import Split
from shoal.strategies.layers.materialization import share_values
from shoal.strategies.layers.module_changes import ModuleChanges
from shoal.strategies.model import ranks_for
from shoal.strategies.pipeline.pipeline_parallel import PipelineParallelModel
from shoal.strategies.settings import Ownership
from shoal.strategies.tensor.parallelize import parallelize
from shoal.strategies.tensor.plan.tensor_plan import TensorPlan
from shoal.strategies.tensor.tensor_parts import TensorParts

_MESH_OPTIONS = ("data", "tensor", "pipeline", "plan")


class HybridShardedModel(PipelineParallelModel):
    """A module whose layers are split, cut into stages and trained on several batches at once.

    The ranks of one replica (tensor and pipeline neighbours) pass the same batch. Training is by
    `train_step`.

    Example:
        >>> model = HybridShardedModel(module, data=2, tensor=2, pipeline=2, zero=1)
        >>> print(model.plan)
        >>> print(model.describe())
    """

    strategy = "hybrid"
    settled = (*PipelineParallelModel.settled, "mesh")
    # Values on the class make these attributes of the wrapper: others are set on the module.
    parts: TensorParts = None  # type: ignore[assignment]
    mesh: Mesh = None  # type: ignore[assignment]

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        data: int | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        plan: Mapping[str, str] | TensorPlan | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Splits, cuts and shares out; every rank starts from rank 0's values.

        Args:
            module: The user's; what it has on the meta device is initialised here.
            world: The ranks; the current world by default.
            data: How many replicas, each with batches of its own; by default what is left.
            tensor: How many ranks share each layer.
            pipeline: How many stages.
            plan: How layers are split; see `TensorParallelModel`.
            seed: For the values of what is on the meta device.
            options: As for `PipelineParallelModel`: ``zero``, ``micro_batches``, ``schedule``, ...
        """
        backend = ranks_for(module, world)
        # Layers are split while the module is whole; what is left of them is cut into stages; and
        # what a rank has is known only then.
        share_values(module, backend, seed)
        current = find_current()
        membership = None if current is None else current.membership
        self._changes = None if membership is None else ModuleChanges(module)
        # One that comes later is alone at first, with all of the model.
        is_alone = membership is not None and membership.generation == 0
        if is_alone:
            mesh = Mesh(world=backend)
        else:
            mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline, world=backend)
        cut = options.pop("cut", None)
        self._settle(
            module,
            mesh,
            backend,
            None if is_alone else plan,
            cut=None if is_alone else cut,
            seed=seed,
            **options,
        )
        self.options |= {
            "data": data, "tensor": tensor, "pipeline": pipeline, "plan": plan, "cut": cut,
        }  # fmt: skip

    def _settle(
        self,
        module: nn.Module,
        mesh: Mesh,
        backend: Backend,
        plan: Mapping[str, str] | TensorPlan | None = None,
        **options: Any,
    ) -> None:
        """Splits, cuts and shares out."""
        with contextlib.nullcontext() if self._changes is None else self._changes.noted():
            stages, tensor_group = mesh.group("pipeline"), mesh.group("tensor")
            parts = parallelize(module, tensor_group, plan)
            self.parts = parts  # all of them, until it is known which are this rank's
            super().__init__(module, backend, mesh=mesh, **options)
            own = [name for name in parts.splits if self.pipeline.stage.parameters.is_own(name)]
            self.parts, self.mesh = parts.among(own), mesh
            ownership = Ownership((stages, tensor_group), parts.ownership.copies, stages)
            self.engine.ownership = ownership

    @property
    def ranks_per_replica(self) -> int:
        """How many ranks hold one model between them."""
        size: int = self.options["tensor"] * self.options["pipeline"]
        return size

    def move_to(self, backend: Backend) -> None:
        """Splits, cuts and shares out anew, over as many replicas as these ranks make."""
        assert self._changes is not None
        old, options, own = self.engine, self.options, vars(nn.Module()).keys()
        of_torch = {key: vars(self)[key] for key in own}
        rest = {key: value for key, value in options.items() if key not in _MESH_OPTIONS}
        old.abandon()
        self._changes.undo()
        self.recomputation = None
        mesh = Mesh(tensor=options["tensor"], pipeline=options["pipeline"], world=backend)
        try:
            self._settle(self.module, mesh, backend, self._agree_on_plan(mesh, backend), **rest)
            self.engine.passes.auto_sync = old.passes.auto_sync
        finally:
            vars(self).update(of_torch, options=options)

    def _agree_on_plan(self, mesh: Mesh, backend: Backend) -> TensorPlan:
        """The plan there was: to find it took long, and hooks that are new would change it."""
        own = self.parts.plan if self.parts.plan.num_ranks == mesh.shape["tensor"] else None
        root = backend.all_gather_object(own is not None).index(True)
        plan: TensorPlan = backend.broadcast_object(own, root=root)
        return plan

    def split_of(self, name: str) -> Split | None:
        """Which part of a full parameter the module has; None for all of it."""
        return self.parts.splits.get(name)

    @property
    def plan(self) -> TensorPlan:
        """How layers are split; prints as a table."""
        return self.parts.plan

    @contextlib.contextmanager
    def own_parameters(self, *, keep_changes: bool) -> Iterator[None]:
        """Inside, the parameters of this stage are whole, also those that are split."""
        with (
            super().own_parameters(keep_changes=keep_changes),
            self.parts.whole(keep_changes=keep_changes),
        ):
            yield

    def own_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The averaged gradients of this stage's parameters, whole."""
        return self.parts.joined(super().own_gradients())

"""`TensorParallelModel`: single layers are split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm import Backend, Mesh, World
from shoal.sharding.split import Split
from shoal.strategies.layers.materialization import share_values
from shoal.strategies.model import ShardedModel, ranks_for
from shoal.strategies.recomputation.stores.keepers import Keepers
from shoal.strategies.settings import LEVELS
from shoal.strategies.tensor.layers.vocabulary import vocabulary_cross_entropy
from shoal.strategies.tensor.parallelize import parallelize
from shoal.strategies.tensor.plan.tensor_plan import TensorPlan
from shoal.strategies.tensor.tensor_parts import TensorParts


class TensorParallelModel(ShardedModel):
    """Each rank has a part of the large layers; activations are summed where parts meet.

    The ranks of one tensor group see the same batch. With more ranks than one tensor group needs,
    the others see other data, and gradients, state and parameters may be sharded over them as well.

    Example:
        >>> model = TensorParallelModel(module, tensor=2, zero=1)
        >>> print(model.plan)
    """

    strategy = "tensor"
    settled: ClassVar[tuple[str, ...]] = ("gather_compression",)
    sharding = LEVELS[0]
    parts: TensorParts
    _all_ranks: Backend

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        tensor: int | None = None,
        data: int | None = None,
        zero: int = 0,
        plan: Mapping[str, str] | TensorPlan | None = None,
        sequence_parallel: bool = False,
        split_logits: bool = False,
        **options: Any,
    ) -> None:
        """Splits the layers; every rank starts from rank 0's values.

        Args:
            module: The user's; its layers are changed in place.
            world: The ranks that train it; the current world by default.
            tensor: How many ranks share each layer; by default all that ``data`` leaves.
            data: How many groups of these there are, each with data of its own.
            zero: What is sharded over the data axis: 0 nothing, 1 the optimizer's state, 2 also
                gradients, 3 also parameters.
            plan: Patterns of names and how to split what fits; by default found automatically.
            sequence_parallel: Whether ranks share out the positions where layers are not split.
            split_logits: Whether each rank keeps the logits of its tokens, for `cross_entropy`.
            options: See `ShardedModel`.
        """
        backend = ranks_for(module, world)
        if zero not in LEVELS:
            raise ValueError(f"zero must be one of {', '.join(map(str, LEVELS))}; got {zero!r}")
        rest = backend.size if data is None or backend.size % data else backend.size // data
        mesh = Mesh(data=data, tensor=rest if tensor is None else tensor, world=backend)
        share_values(module, backend, options.get("seed", 0))
        parts = parallelize(
            module,
            mesh.group("tensor"),
            plan,
            sequence_parallel=sequence_parallel,
            splits_logits=split_logits,
        )
        # `ShardedModel` needs these while it is initialised; afterwards it would hand attributes
        # that it does not know on to the module.
        self.sharding, self.is_part = LEVELS[zero], parts.group.size > 1
        self.parts, self._all_ranks = parts, backend
        self.keepers = Keepers(tensor=parts.group)
        super().__init__(module, mesh.group("data"), **options)
        self.engine.ownership = parts.ownership
        self.options |= {
            "tensor": tensor, "data": data, "zero": zero, "plan": plan,
            "sequence_parallel": sequence_parallel, "split_logits": split_logits,
        }  # fmt: skip

    @property
    def all_ranks(self) -> Backend:
        """All ranks that hold something of this model."""
        return self._all_ranks

    def split_of(self, name: str) -> Split | None:
        """Which part of a full parameter the module has; None for all of it."""
        return self.parts.splits.get(name)

    @property
    def plan(self) -> TensorPlan:
        """What is split, and how; prints as a table."""
        return self.parts.plan

    @property
    def tensor_group(self) -> Backend:
        """The ranks that share the layers with this one."""
        return self.parts.group

    def cross_entropy(self, logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """The mean cross entropy, also of split logits; a ``loss_fn`` for `train_step`.

        Args:
            logits: What the model returns, classes in the last dimension.
            targets: Classes by number, of the shape of logits without the last dimension.
            ignore_index: Targets of this number do not count.
        """
        sizes = [layer.cut.size for layer in self.plan.layers if layer.gives_logits]
        if not self.options["split_logits"] or not sizes:
            flat = logits.reshape(-1, logits.shape[-1])
            return F.cross_entropy(flat, targets.reshape(-1), ignore_index=ignore_index)
        return vocabulary_cross_entropy(logits, targets, self.tensor_group, sizes[-1], ignore_index)

    @contextmanager
    def whole_parameters(self, *, keep_changes: bool) -> Iterator[None]:
        """All parameters whole on every rank, over both axes."""
        with (
            super().whole_parameters(keep_changes=keep_changes),
            self.parts.whole(keep_changes=keep_changes),
        ):
            yield

    def full_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter's averaged gradient, whole; all ranks walk through them together."""
        return self.parts.joined(super().full_gradients())

"""`ShardedModel`: the user's module, unchanged inside, trained by many ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shoal.comm import Backend, World
from shoal.comm.world import current
from shoal.compression import Codec
from shoal.errors import ShoalError
from shoal.sharding.extent import Extent
from shoal.sharding.holding import Held
from shoal.sharding.split import Split
from shoal.strategies.compressing import (
    check_replicas,
    compression_in_words,
    parse_compression,
    parse_gather_compression,
)
from shoal.strategies.consistency.drift import CHECK_EVERY
from shoal.strategies.engine.engine import Engine
from shoal.strategies.foreign import refuse_foreign_model
from shoal.strategies.gradients.compressed.state import CompressionState
from shoal.strategies.layers.batch_norm import check_layers, check_plain_layers, synchronize
from shoal.strategies.layers.materialization import materialize
from shoal.strategies.layers.precision import parse_precision
from shoal.strategies.options import check_options, compare_options
from shoal.strategies.recomputation.automatic import Automatic, Surroundings
from shoal.strategies.recomputation.kept_memory import KeptMemory
from shoal.strategies.recomputation.policy import Policy, parse_bytes, parse_policy
from shoal.strategies.recomputation.recomputation import Recomputation, stop_caching
from shoal.strategies.recomputation.stores.keepers import Keepers, make_store
from shoal.strategies.settings import Compression, Ranks, Settings, Sharding
from shoal.strategies.training import LossFunction, call_module, count_items, weighted_backward
from shoal.strategies.wrapper import ModuleWrapper
from shoal.torch_internals.tensors import sum_of_versions

# What travels at once where every rank has all gradients anyway; and where it keeps its part only.
_BUCKET_BYTES = 25 << 20
_SHARDED_BUCKET_BYTES = 4 << 20
# What is reduced at once where ranks share memory, and parameters need not travel.
_IN_PLACE_BYTES = 8 << 20


class ShardedModel(ModuleWrapper):
    """A module wrapped for data-parallel training; names and attributes stay the module's own.

    Use one of its kinds (`DDPModel`, `ZeRO3Model`, ...), which differ in what they shard.
    """

    own_attributes: ClassVar[tuple[str, ...]] = ("engine", "options", "optimizers", "training")
    strategy: ClassVar[str]
    sharding: Sharding
    is_part: bool = False
    """Whether these ranks hold a part of the model only, and wait for others in every pass."""

    def __new__(
        cls, module: nn.Module, world: World | Backend | None = None, **options: Any
    ) -> Self:
        """Checks the options, and that all ranks have them, before anything is done."""
        kinds: dict[str, type[ModuleWrapper]] = {
            kind.strategy: kind for kind in _kinds_below(ShardedModel)
        }
        kinds[cls.strategy] = cls
        check_options(options, cls.strategy, kinds)
        compare_options(options, cls, cls.strategy, ranks_for(module, world))
        return super().__new__(cls)

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        min_group_bytes: int | None = None,
        auto_sync: bool = True,
        sync_batchnorm: bool = False,
        average_buffers: bool = False,
        seed: int = 0,
        mixed_precision: str | torch.dtype | None = None,
        replica: int = 1,
        resident_below: int = 0,
        prefetch_bytes: int = 1,
        check_every: int = CHECK_EVERY,
        activations: str | Policy | None = None,
        memory: int | str | None = None,
        compression: str | Codec | None = None,
        error_feedback: bool = True,
        compression_warmup: int = 0,
        gather_compression: str | Codec | None = None,
    ) -> None:
        """Takes over the module's parameters; every rank starts from rank 0's values.

        Args:
            module: The user's; what it has on the meta device is initialised here.
            world: The ranks that train it; the current world by default.
            min_group_bytes: See `ParameterAnalyzer`; by default 1 MiB between threads, 4 MiB
                between processes and 24 MiB over NCCL, and more where only gradients travel.
            auto_sync: Whether each backward averages the gradients over the ranks.
            sync_batchnorm: Whether BatchNorm sees the rows of all ranks instead of this one's.
            average_buffers: Whether floating buffers that forward changes become the average over
                the ranks; by default all ranks go on with rank 0's.
            seed: For the values of what is on the meta device.
            mixed_precision: "bf16" or "fp16" to compute with; the optimizer steps float32.
            replica: How many groups of ranks hold all shards between them; for sharded parameters.
            resident_below: Parameters of fewer elements are not sharded.
            prefetch_bytes: How much of the parameters is gathered in the background, ahead of what
                is in use: as many groups as have so many bytes, so by default one. 0 for none.
            check_every: Before every how many-th step the ranks compare a fingerprint of what all
                of them hold, and more often in the beginning; 0 for never.
            activations: What blocks keep for backward, and where: "full" or "selective" (the rest
                is computed again), "offload", "partition", "peer", "auto", or a `Policy`; by
                default everything, here.
            memory: For "auto": the bytes that this rank may use in all, as in "80GB".
            compression: How gradients travel, for example "int8", "topk:0.01" or "powersgd:2", or a
                `shoal.compression.Codec`; by default uncompressed.
            error_feedback: Whether what compression leaves out is added to the next gradients; it
                takes as much memory as all gradients, on every rank.
            compression_warmup: How many steps are made with uncompressed gradients first.
            gather_compression: "int8" or a `shoal.compression.Quantize` of 8 bits: matrices are
                gathered so, and all ranks compute with what arrives; the optimizer steps masters.
        """
        super().__init__()
        backend = ranks_for(module, world)
        # Not registered as a child, so that names get no prefix.
        object.__setattr__(self, "module", module)
        materialize(module, backend.device, seed)
        check_layers(module) if sync_batchnorm else check_plain_layers(module)
        group_bytes = self._group_bytes(backend) if min_group_bytes is None else min_group_bytes
        names = [name for name, _ in module.named_parameters() if self.is_part]
        settings = Settings(
            group_bytes,
            parse_precision(mixed_precision),
            resident_below,
            prefetch_bytes,
            has_meetings=sync_batchnorm or self.is_part,
            hides_gradients=self.is_part,
            check_every=check_every,
            averages_buffers=average_buffers,
            compression=parse_compression(
                compression, module, error_feedback=error_feedback, warmup_steps=compression_warmup
            ),
            gather_codec=parse_gather_compression(gather_compression, self.strategy, self.sharding),
            copied=frozenset(name for name in names if self.split_of(name) is None),
        )
        if settings.compression is not None:
            check_replicas(replica)
        ranks = Ranks.of(backend, replica, is_sharded=self.sharding.parameters)
        self.engine = Engine(module, ranks, self.sharding, settings)
        self.engine.passes.auto_sync = auto_sync
        if sync_batchnorm:
            synchronize(module, backend)
        self._recompute(module, activations, memory)
        if self.recomputation is not None:
            self.recomputation.memory = KeptMemory(self.engine.account.ledger)
            self.recomputation.check_every = check_every
        self.options: dict[str, Any] = {
            "min_group_bytes": min_group_bytes,
            "auto_sync": auto_sync,
            "sync_batchnorm": sync_batchnorm,
            "average_buffers": average_buffers,
            "seed": seed,
            "mixed_precision": mixed_precision,
            "replica": replica,
            "resident_below": resident_below,
            "prefetch_bytes": prefetch_bytes,
            "check_every": check_every,
            "activations": activations,
            "memory": memory,
            "compression": compression,
            "error_feedback": error_feedback,
            "compression_warmup": compression_warmup,
            "gather_compression": gather_compression,
        }
        self.optimizers: list[Any] = []
        """What steps this model's memory."""
        self.training = module.training

    recomputation: Recomputation | None = None
    """The blocks whose activations are not kept, if there are any."""

    keepers = Keepers()
    """Who may hold this rank's activations."""

    def _recompute(
        self, module: nn.Module, activations: str | Policy | None, memory: int | str | None
    ) -> None:
        """Has blocks computed again; a subclass may have done it before."""
        policy = parse_policy(activations, memory)
        if policy is not None and self.recomputation is None:
            device = next((each.device for each in module.parameters()), torch.device("cpu"))
            store = make_store(policy, self.keepers, device)
            automatic = None if memory is None else Automatic(module, parse_bytes(memory))
            stop_caching(module)
            self.recomputation = Recomputation(module, policy, store, automatic)
        if self.recomputation is not None:
            self.recomputation.stops_early = not self.is_part
            self.recomputation.generation = self._generation_of

    def begin_forward(self) -> None:
        """Settles what blocks keep, where that is still to be chosen; in training all ranks do."""
        if self.recomputation is None or not torch.is_grad_enabled():
            return
        automatic = self.recomputation.automatic
        if automatic is not None and automatic.surroundings is None:
            automatic.surroundings = Surroundings(
                self.all_ranks.lane(automatic),
                self.engine.account.ledger.watermark(without="activations"),
                lambda: self.engine.progress.words()[0],
                self.keepers.in_flight,
                self.keepers.part,
            )
        self.recomputation.begin_forward()

    def _generation_of(self, parameters: Iterable[Tensor]) -> object:
        """Differs once some parameters have new values."""
        engine, sharded, others = self.engine, [], []
        for parameter in parameters:
            located = engine.index_of.get(id(parameter))
            if located is not None and engine.groups[located[0]].is_sharded:
                sharded.append(located)  # gathering it is no change, but counts as a version
            else:
                others.append(parameter)
        return engine.gathering.saved.last_change(sharded), sum_of_versions(others)

    def _group_bytes(self, backend: Backend) -> int:
        """Few long messages where nothing is freed early anyway."""
        if backend.shares_memory:
            return _IN_PLACE_BYTES
        if self.sharding.parameters:
            return backend.worthwhile_bytes
        if self.sharding.gradients:
            return max(_SHARDED_BUCKET_BYTES, backend.worthwhile_bytes)
        return _BUCKET_BYTES

    def keep_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Lays the memory out anew so that these parameters are not cut between ranks."""
        self._check_free("an optimizer that needs whole parameters")
        self._lay_out(parameters)

    def shard_as(self, sharding: Sharding, optimizer: str) -> None:
        """Lays the memory out anew, for an optimizer that divides it in another way."""
        self._check_free(f"a {optimizer}")
        vars(self)["sharding"] = sharding
        self._lay_out()

    def compress(self, compression: Compression, optimizer: str) -> None:
        """Lays the memory out anew, for gradients that travel compressed."""
        self._check_free(f"a {optimizer}")
        check_replicas(1 if self.engine.ranks.replica_group is None else 2)
        self._lay_out(settings=replace(self.engine.settings, compression=compression))

    def _check_free(self, who: str) -> None:
        if self.optimizers:
            raise ShoalError(
                f"{who} must be wrapped before the others of the same model, because the memory is "
                f"laid out for it; the model has a {type(self.optimizers[0]).__name__} already"
            )

    def _lay_out(
        self, undivided: Sequence[nn.Parameter] = (), settings: Settings | None = None
    ) -> None:
        old = self.engine
        old.dissolve()
        settings = settings or old.settings
        self.engine = Engine(self.module, old.ranks, self.sharding, settings, undivided)
        self.engine.passes.auto_sync = old.passes.auto_sync
        self.engine.ownership = old.ownership

    def move_to(self, backend: Backend) -> None:
        """Lays everything out over other ranks, after those that there were are gone or about to.

        Nothing is asked of the old ones. Parameters have no values until they are loaded.
        """
        old, options = self.engine, self.options
        old.abandon()
        ranks = Ranks.of(backend, options["replica"], is_sharded=self.sharding.parameters)
        self.engine = Engine(self.module, ranks, self.sharding, old.settings)
        self.engine.passes.auto_sync = old.passes.auto_sync
        if options["sync_batchnorm"]:
            synchronize(self.module, backend)
        if self.recomputation is not None:
            self.recomputation.memory = KeptMemory(self.engine.account.ledger)
            if self.recomputation.automatic is not None:
                self.recomputation.automatic.move_to(backend)

    @property
    def data_group(self) -> Backend:
        """The ranks that see other data; those beyond it see the same as one of these."""
        return self.engine.backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        self.begin_forward()
        if self.uneven_rows:
            self._warn_of_uneven_parts()
        return self.module(*args, **kwargs)

    uneven_rows = 0
    """Rows of the global batch at hand, if a divided loader had to give ranks unequal parts."""
    _has_warned = False

    def _warn_of_uneven_parts(self) -> None:
        rows, self.uneven_rows = self.uneven_rows, 0
        is_training = self.training and torch.is_grad_enabled()
        if self._has_warned or not is_training or self.data_group.rank:
            return
        self._has_warned = True
        warnings.warn(
            f"a batch of {rows} rows was divided over {self.data_group.size} ranks in parts of "
            "different size. loss.backward() gives all parts the same weight, so the rows of the "
            "smaller ones count more than in one process. model.train_step(inputs, targets, "
            "loss_fn) weights them by their rows; or give the loader drop_last=True and a "
            "batch_size that the number of ranks divides",
            stacklevel=5,
        )

    def train_step(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, *, weight: float | None = None
    ) -> Tensor:
        """Forward and backward of one local batch; neither zeroes gradients nor steps.

        Args:
            inputs: What the module is called with. A tuple is expanded into arguments; a dict is
                passed as one argument unless its keys name forward's parameters.
            targets: The second argument of ``loss_fn``.
            loss_fn: ``loss_fn(output, targets)``, the mean over the local batch.
            weight: How much the local batch counts; by default its number of items. May be zero.

        Returns:
            The mean loss over the global batch, the same on every rank.
        """
        self.uneven_rows = 0  # they are weighted below
        output = call_module(self, self.module, inputs)
        loss = loss_fn(output, targets)
        count = count_items(inputs) if weight is None else weight
        return weighted_backward(loss, output, count, self.engine.backend)

    # Gradients --------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up locally; the next backward outside averages them all."""
        before, self.engine.passes.auto_sync = self.engine.passes.auto_sync, False
        try:
            yield
        finally:
            self.engine.passes.auto_sync = before

    def synchronize_gradients(self) -> None:
        """Averages the gradients over the ranks now; for ``auto_sync=False``."""
        self.engine.passes.synchronize()

    def gradients_are_final(self) -> AbstractContextManager[None]:
        """Around ``parameter.grad = ...``, or a step: they are the same on every rank already.

        Elsewhere gradients that are put in by hand are averaged over the ranks at the step.
        """
        return self.engine.gradients.hand_made.final()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, or makes them zero."""
        if set_to_none:
            self.engine.gradients.clear()
        else:
            self.engine.gradients.zero(list(self.module.parameters()), set_to_none=False)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scales the gradients so that their norm over all ranks is at most ``max_norm``.

        As `torch.nn.utils.clip_grad_norm_`; ``foreach`` makes no difference.
        """
        gradients = self.engine.gradients
        return gradients.clip_norm(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamps every element of the gradients; ``foreach`` makes no difference."""
        self.engine.gradients.clip_value(clip_value)

    # Parameters -------------------------------------------------------------------------

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, all parameters are whole on every rank; changes to them are kept."""
        return self.whole_parameters(keep_changes=True)

    def whole_parameters(self, *, keep_changes: bool) -> AbstractContextManager[None]:
        """All parameters whole on every rank, whichever ranks hold parts of them."""
        return self.engine.parameters.full(keep_changes=keep_changes)

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Inside, what was gathered for one prediction is kept for the next, without gradients.

        Training ends it early: an optimizer's step frees what was gathered.
        """
        try:
            with torch.no_grad(), self.engine.gathering.keeping():
                yield
        finally:
            self.engine.gathering.free_unless_kept()

    def gradient_shard(self, name: str) -> Tensor | None:
        """This rank's part of a parameter's averaged gradient, flat; None if it has none."""
        return self.engine.gradients.shard(name)

    def full_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter's averaged gradient, whole; all ranks walk through them together."""
        self.engine.gradients.adopt()
        for name, parameter in self.module.named_parameters():
            shard = self.engine.gradients.shard(name)
            if shard is None:
                yield name, None
            else:
                whole = self.engine.shard_group.all_gather(shard)
                yield name, whole[: parameter.numel()].view(parameter.shape)

    def synchronize_buffers(self) -> None:
        """Gives all ranks the buffers that training goes on with; every rank calls it.

        A forward in training begins with it. Call it where ranks look at buffers that the last
        forward has changed, as before each rank evaluates its part of the data.
        """
        self.engine.passes.share_buffers()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's full state under its own names; every rank calls it.

        Where everything is replicated (``ddp``) nothing is exchanged, so that a rank may call it
        alone; buffers are this rank's then, and rank 0's are the ones that count.
        """
        self.engine.steps.check()
        if self.is_part or self.sharding.optimizer:
            self.synchronize_buffers()
        with self.whole_parameters(keep_changes=False):
            state = self.module.state_dict(*args, **kwargs)
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    def full_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same as `state_dict`, which is full under every strategy."""
        return self.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a full state under the module's own names; every rank calls it.

        Values are copied, also with ``assign``: the memory is the engine's.
        """
        with self.full_parameters():
            outcome = self.module.load_state_dict(state_dict, strict=strict)
        if not outcome.missing_keys:
            self.engine.steps.is_torn = False
        return outcome

    # What this rank holds ---------------------------------------------------------------

    @property
    def all_ranks(self) -> Backend:
        """All ranks that hold something of this model."""
        return self.engine.ranks.all

    @property
    def ranks_per_replica(self) -> int:
        """How many ranks hold one model between them, each a part of its layers."""
        return 1

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the values of a buffer."""
        return True

    def check_ranks(self, doing: str) -> None:
        """Raises if the ranks do not train alike, or have drifted apart; every rank calls it."""
        self.engine.progress.compare(self.all_ranks)
        self.engine.replicas.check(doing)

    def split_of(self, name: str) -> Split | None:
        """Which part of a full parameter the module has; None for all of it."""
        return None

    def held(self) -> Iterator[Held]:
        """What this rank steps of the parameters: masters, under full names.

        Between them the ranks hold every element, some perhaps several times.
        """
        self.engine.parameters.check_concealed("parameters may change")
        self.engine.parameters.adopt_changes("looking at what each rank holds")
        for group in self.engine.groups:
            low, high = group.master_bounds
            for slot in group.layout.slots:
                start, stop = (min(max(edge, low), high) for edge in slot.bounds)
                split = self.split_of(slot.name)
                shape = slot.shape if split is None else split.shape
                extent = Extent(shape, start - slot.start, stop - slot.start, split)
                if start < stop or (start == stop == slot.start and not slot.shape.numel()):
                    yield Held(slot.name, extent, group.master[start - low : stop - low])

    @property
    def compression_state(self) -> CompressionState | None:
        """What compressed gradients have to save; None where they are not compressed."""
        gradients = self.engine.gradients
        if gradients.exchanges is None:
            return None
        exchanges = [each.exchange for each in gradients if each.exchange is not None]
        return CompressionState(exchanges, gradients.exchanges, self.split_of)

    def held_dtypes(self) -> dict[str, torch.dtype]:
        """What optimizers step this rank's parameters in, by name: the dtype of `held`."""
        return {name: group.master_dtype for group in self.engine.groups for name in group.names}

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Inside, what `held` gives may be written to; afterwards every rank has the new values."""
        with (
            torch.no_grad(),
            self.engine.parameters.stepping(list(self.module.parameters()), "shoal.load()"),
        ):
            yield

    def describe(self) -> str:
        """How it is trained: strategy, ranks, memory, and what its optimizers may divide.

        Example:
            >>> print(model.describe())
            zero2 over 4 ranks: 1,234 parameters in 1 group of memory
            AdamW is element-wise: torch's own AdamW
        """
        slots = [slot for group in self.engine.groups for slot in group.layout.slots]
        count = sum(slot.shape.numel() for slot in slots)
        num_groups = len(self.engine.groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        ranks = "1 rank" if self.all_ranks.size == 1 else f"{self.all_ranks.size} ranks"
        head = f"{self.strategy} over {ranks}: {count:,} parameters in {groups} of memory"
        lines = [head, *self._compression_in_words()]
        if self.recomputation is not None:
            lines.append(self.recomputation.describe())
        return "\n".join([*lines, *(optimizer.describe() for optimizer in self.optimizers)])

    def _compression_in_words(self) -> Iterator[str]:
        return compression_in_words(self.engine)

    # Of `torch.nn.Module` -----------------------------------------------------------------

    def apply(self, fn: Callable[[nn.Module], None]) -> ShardedModel:
        """Applies a function to every part of the module, with all parameters whole."""
        with self.full_parameters():
            self.module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModel:
        """Nothing to do for what changes nothing, such as ``.to(device)`` where it is already."""
        kinds = {(t.dtype, t.device) for t in (*self.module.parameters(), *self.module.buffers())}
        probes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
        if all(fn(p).dtype is p.dtype and fn(p).device == p.device for p in probes):
            return self
        raise ShoalError(
            "the parameters' memory is shared out over the ranks and cannot be moved or converted: "
            "call .to(), .cuda(), .half() and the like on the module before it is wrapped"
        )


def ranks_for(module: nn.Module, world: World | Backend | None) -> Backend:
    """The ranks that a plain module is wrapped for, by default those of the current world."""
    if isinstance(module, ShardedModel):
        raise TypeError("the model is wrapped already; wrap the plain module once")
    refuse_foreign_model(module)
    return world if isinstance(world, Backend) else (world or current()).backend


def _kinds_below(kind: type[ShardedModel]) -> Iterator[type[ShardedModel]]:
    """All that have the name of a strategy."""
    for each in kind.__subclasses__():
        if hasattr(each, "strategy"):
            yield each
        yield from _kinds_below(each)

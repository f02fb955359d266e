"""Splitting a module's layers over the ranks of a group, in place; and how a forward begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm import differentiable as collective
from shoal.comm.agreement import agree
from shoal.errors import MismatchError
from shoal.sharding.split import Split
from shoal.strategies.tensor.layers.attention import make_attention
from shoal.strategies.tensor.layers.dropout import SplitDropout, during, has_rate
from shoal.strategies.tensor.layers.linear import make_column, make_row
from shoal.strategies.tensor.layers.sequence import (
    SequenceTrial,
    Stack,
    find_stacks,
    gather_main_input,
    install,
)
from shoal.strategies.tensor.layers.vocabulary import make_head_table, make_vocabulary
from shoal.strategies.tensor.plan.tensor_plan import (
    Layer,
    SplitBlock,
    Style,
    TensorPlan,
    all_splits,
)
from shoal.strategies.tensor.plan.user_plan import make_plan
from shoal.strategies.tensor.region import RegionEntry, TensorGroup
from shoal.strategies.tensor.split_parameter import ReadGuard
from shoal.strategies.tensor.tensor_parts import TensorParts
from shoal.torch_internals.tensors import hooks_before_gradient
from shoal.torch_internals.trees import tree_leaves
from shoal.torch_support.fingerprint import checksum, fingerprint
from shoal.torch_support.random_state import set_torch_states, torch_states


def parallelize(
    module: nn.Module,
    group: Backend,
    plan: Mapping[str, str] | TensorPlan | None = None,
    *,
    sequence_parallel: bool = False,
    splits_logits: bool = False,
) -> TensorParts:
    """Leaves each rank its part of the layers, and lets these communicate.

    Modules and parameters stay the objects they are, under the names they have. All ranks must have
    the same values to begin with.

    Args:
        module: Is changed in place; not at all if the plan cannot be carried out.
        group: The ranks that share the layers.
        plan: Patterns of names and how to split the layers that fit ("column", "row",
            "vocabulary", "heads", "replicated"); None to find out.
        sequence_parallel: Whether each rank has some positions only where layers are not split;
            see [Note: stacks].
        splits_logits: Whether heads leave each rank the logits of its tokens only, for a loss that
            knows: `vocabulary_cross_entropy`.

    Returns:
        Which parts of which parameters each rank has.

    Example:
        >>> parts = parallelize(module, Mesh(tensor=2).group("tensor"))
        >>> print(parts.plan)
    """
    chosen = make_plan(module, group.size, plan)
    agree(group, repr(chosen.blocks), "same")
    splits = _first_names(module, chosen)
    stacks = find_stacks(module, chosen) if sequence_parallel and group.size > 1 else []
    if sequence_parallel and group.size > 1 and not stacks:
        raise ValueError(
            "sequence_parallel=True needs an nn.ModuleList or nn.Sequential of blocks in each of "
            "which something is split; the plan has none:\n" + str(chosen)
        )
    sequence_trial = SequenceTrial(module, stacks, chosen)
    guard = ReadGuard({name: module.get_parameter(name) for name in splits})
    shared = TensorGroup(group, guard)
    for name, ranks in splits.items():
        parameter = module.get_parameter(name)
        parameter.data = ranks[group.rank].take(parameter.data)
        parameter.grad = None
    for block in chosen.blocks:
        stack = next((stack for stack in stacks if stack.holds(block.name)), None)
        _rebuild(module, block, shared, stack, splits_logits)
    _leave_fast_paths(module)
    sequence_trial.check({name: ranks[group.rank] for name, ranks in splits.items()}, group)
    for parameter in _partial(module, chosen, stacks, splits):
        _sum_gradients(parameter, group)
    for stack in stacks:
        install(module, stack, group, drops=sequence_trial.drops)
    _surround_forward(module, group, guard)
    return TensorParts(module, shared, chosen, splits)


def _first_names(module: nn.Module, plan: TensorPlan) -> dict[str, tuple[Split, ...]]:
    """Each parameter once, by the name that the module has for it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, tuple[Split, ...]] = {}
    for _, name, splits in all_splits(module, plan):
        found[names[id(module.get_parameter(name))]] = splits
    return {name: found[name] for name in names.values() if name in found}


def _partial(
    module: nn.Module, plan: TensorPlan, stacks: list[Stack], splits: Mapping[str, object]
) -> Iterable[nn.Parameter]:
    """Parameters that every rank has whole, but gets gradients of a part of the activations for."""
    split = {id(module.get_parameter(name)) for name in splits}
    blocks = [module.get_submodule(name) for stack in stacks for name in stack.names]
    loose = [p for block in blocks for p in block.parameters() if id(p) not in split]
    inside = [module.get_parameter(name) for block in plan.blocks for name in block.partial]
    return {id(parameter): parameter for parameter in (*loose, *inside)}.values()


def _rebuild(
    module: nn.Module,
    block: SplitBlock,
    group: TensorGroup,
    stack: Stack | None,
    splits_logits: bool,
) -> None:
    part = module.get_submodule(block.name)
    entry = RegionEntry(group)
    if stack is not None:
        is_own = isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        entry = RegionEntry(group, stack.dim, gathers_all=is_own)
        if not is_own and not isinstance(part, nn.MultiheadAttention):
            gather_main_input(part, entry)
    for layer in block.layers:
        keeps_split = splits_logits and layer.gives_logits
        _rebuild_layer(module.get_submodule(layer.name), layer, group, entry, keeps_split)
    rank, size = group.backend.rank, group.backend.size
    for name, attribute, cut in block.adjustments:
        setattr(module.get_submodule(name), attribute, cut.length(rank, size))
    rows = [layer for layer in block.layers if layer.style is Style.ROW and not layer.is_alone]
    if rows:
        entry.watch(part)
        _watch_dropout(part, block, rows[0], group.backend, entry)


def _rebuild_layer(
    part: Any, layer: Layer, group: TensorGroup, entry: RegionEntry, keeps_split: bool
) -> None:
    if layer.style is Style.COLUMN:
        is_joined = layer.is_alone and not keeps_split
        make_column(part, group, layer.cut, entry, is_joined=is_joined)
    elif layer.style is Style.ROW:
        make_row(part, group, layer.cut, entry, is_cut=layer.is_alone)
    elif layer.style is Style.VOCABULARY:
        make_vocabulary(part, group, layer.cut)
    elif isinstance(part, nn.Embedding):
        make_head_table(part, group, layer.cut)
    else:
        make_attention(part, group, layer.cut, entry)


def _sum_gradients(parameter: nn.Parameter, group: Backend) -> None:
    """Each rank's gradient comes from its part of the activations; the sum is the gradient."""
    was_trainable = parameter.requires_grad
    # The hook can only be hung on what wants gradients, and it may want some later.
    parameter.requires_grad_(True)
    parameter.register_hook(lambda gradient: collective.reduce(gradient, group))
    parameter.requires_grad_(was_trainable)
    # A user's hooks come after the sum: they are for the gradient, not for a part of it.
    hooks: Any = hooks_before_gradient(parameter)
    *others, last = hooks.items()
    hooks.clear()  # torch goes by the order in which they were put in, not by `move_to_end`
    hooks.update([last, *others])


def _watch_dropout(
    part: nn.Module, block: SplitBlock, row: Layer, group: Backend, entry: RegionEntry
) -> None:
    """While a block is called in training, what it drops of split activations fits together."""
    if not (block.drops or has_rate(part)):
        return

    def mode() -> SplitDropout:
        entry.forget()  # recomputation may have ended in the middle of the region
        return SplitDropout(group, lambda: entry.is_inside and part.training, row.cut, block.heads)

    during(part, mode)


def _leave_fast_paths(module: nn.Module) -> None:
    """Torch's layers have fast paths that read weights without calling their layers."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def _surround_forward(module: nn.Module, group: Backend, guard: ReadGuard) -> None:
    """Ranks begin each forward together, and split parameters are guarded until it ends."""
    if group.size == 1:
        return

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        device = next((p.device for p in module.parameters()), group.device)
        begin_together(group, device, (args, kwargs))
        guard.begin()

    module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda *_: guard.end(), always_call=True)


Seen = list[tuple[str, str, int]]
"""Of each tensor dtype and shape, a fingerprint of a sample, and a checksum of all elements."""


def begin_together(group: Backend, device: torch.device, inputs: Any) -> None:
    """Compares what the ranks were given, and lets all go on with the first one's generators.

    With different batches each rank would multiply its part of a weight with other inputs, and the
    sums would belong to no batch at all. With different random numbers ranks would drop different
    activations. Of tensors shapes, a sample and a sum over all elements are compared.

    Raises:
        MismatchError: On all ranks of the group, if tensors among the inputs differ.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    seen = [
        (f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}", fingerprint(x), int(checksum(x)))
        for x in tensors
    ]
    generators = torch_states(device) if group.rank == 0 else []
    answers = group.all_gather_object((seen, generators))
    _check_same([fingerprints for fingerprints, _ in answers])
    if group.rank > 0:
        set_torch_states(answers[0][1], device)


def _check_same(everybody: list[Seen]) -> None:
    odd = next((rank for rank, other in enumerate(everybody) if other != everybody[0]), None)
    if odd is not None:
        raise MismatchError(
            f"the ranks of a tensor group must be given the same batch; ranks 0 and {odd} of the "
            f"group got {_described(everybody[0])} and {_described(everybody[odd])}. Choose the "
            "batch by model.data_group (its rank and size), not by the world: "
            "shoal.sampler(data, batch_size, world=model.data_group)."
        )


def _described(seen: Seen) -> str:
    return ", ".join(f"{kind} (checksum {total})" for kind, _, total in seen)

"""Whether a candidate may be split as it is proposed; blocks that look alike have one verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.sharding.split import Split
from shoal.strategies.tensor.plan.candidates import Candidate
from shoal.strategies.tensor.plan.proposals import Proposal
from shoal.strategies.tensor.plan.splits import join_names, parameter_splits
from shoal.strategies.tensor.plan.tensor_plan import Adjustment, Layer, SplitBlock, Style
from shoal.strategies.tensor.trial.split_trial import may_split
from shoal.strategies.tensor.trial.trial_run import SplitTrial
from shoal.strategies.tensor.user_hooks import have_hooks, reason_to_stay_whole
from shoal.torch_internals.modules import hooks_of

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
# What torch keeps in every module, and the number of a layer among its like.
_NOT_DESCRIBED = {*vars(nn.Module()), "layer_idx"}


@dataclass(frozen=True)
class Verdict:
    """A way to split a block that is right.

    Attributes:
        proposal: The way.
        partial: Parameters that get partial gradients, by name in the block.
        inside: Modules that work on parts of activations, by name in the block.
        drops: Whether something of parts of activations may be dropped in training.
    """

    proposal: Proposal
    partial: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    drops: bool = False


def try_proposal(
    candidate: Candidate,
    block: nn.Module,
    proposal: Proposal,
    num_ranks: int,
    stand_in: nn.Module | None = None,
) -> Verdict | None:
    """How the block may be split; None if it may not be split this way.

    Raises:
        TypeError: If the block cannot be called with one tensor, so that nothing is known.
    """
    layers = make_block(candidate, Verdict(proposal)).layers
    prefix = f"{candidate.block}." if candidate.block else ""
    splits: dict[str, tuple[Split, ...]] = {}
    numbers = []
    for layer in layers:
        path = layer.name.removeprefix(prefix)
        part = block.get_submodule(path)
        for key, values in parameter_splits(part, layer, num_ranks).items():
            splits[f"{path}.{key}"] = values
        if hasattr(part, "nf") and layer.style is Style.COLUMN:
            numbers.append((part, "nf", layer.cut))
    numbers += [(block.get_submodule(p), name, cut) for p, name, cut in proposal.numbers]
    trial = SplitTrial(
        stand_in or block,
        [block.get_submodule(path) for path in candidate.columns],
        block.get_submodule(candidate.row),
        splits,
        [
            (m, name, [cut.length(r, num_ranks) for r in range(num_ranks)])
            for m, name, cut in numbers
        ],
        attends=proposal.heads is not None,
    )
    found = may_split(trial, num_ranks)
    if found is None:
        return None
    inside = [name for name, part in block.named_modules() if part in found.inside]
    partial = [name for name, _ in block.named_parameters() if name in found.partial]
    return Verdict(proposal, tuple(partial), tuple(inside), found.drops)


def are_hooked(candidate: Candidate, block: nn.Module) -> bool:
    """Whether hooks would get parts if a candidate were split; see [Note: hooks]."""
    layers = [block.get_submodule(path) for path in (*candidate.columns, candidate.row)]
    inside = [block.get_submodule(path) for path in candidate.inside]
    return have_hooks([*layers, *inside]) or any(map(reason_to_stay_whole, layers))


def between(block: nn.Module, candidate: Candidate) -> tuple[str, ...]:
    """All parameters of a block but those of its columns and its row."""
    layers = (*candidate.columns, candidate.row)
    return tuple(
        name for name, _ in block.named_parameters() if name.rpartition(".")[0] not in layers
    )


def make_block(candidate: Candidate, verdict: Verdict) -> SplitBlock:
    """A candidate, split in a way that is right."""
    name, proposal = candidate.block, verdict.proposal
    layers = [
        Layer(join_names(name, path), Style.COLUMN, cut, block=name)
        for path, cut in zip(candidate.columns, proposal.columns, strict=True)
    ]
    layers.append(Layer(join_names(name, candidate.row), Style.ROW, proposal.row, block=name))
    for path in proposal.tables:
        assert proposal.heads is not None
        layers.append(Layer(join_names(name, path), Style.HEADS, proposal.heads, block=name))
    return SplitBlock(
        name,
        tuple(layers),
        tuple(Adjustment(join_names(name, path), key, cut) for path, key, cut in proposal.numbers),
        tuple(join_names(name, path) for path in verdict.partial),
        proposal.heads,
        tuple(join_names(name, path) for path in verdict.inside),
        verdict.drops,
    )


def describe(block: nn.Module) -> str:
    """Everything that decides how a block computes, but for its weights."""
    parts = []
    for name, part in block.named_modules():
        own = {k: _described(v) for k, v in vars(part).items() if k not in _NOT_DESCRIBED}
        shapes = [(key, tuple(p.shape)) for key, p in part.named_parameters(recurse=False)]
        shapes += [(key, tuple(b.shape)) for key, b in part.named_buffers(recurse=False)]
        hooks = [id(hook) for hook in hooks_of(part)]
        parts.append(f"{name} {id(type(part))} {sorted(own.items())} {shapes} {hooks}")
    return "\n".join(parts)


def _described(value: Any) -> str:
    """By value where it can be told; objects and functions are like themselves only."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[_described(each) for each in value]}"
    return repr(value) if isinstance(value, _PLAIN) else f"{type(value).__name__} {id(value)}"

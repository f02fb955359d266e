"""Which inputs take the same route: those of one structure, in one mode of the model.

Also the check that all ranks of a pipeline were given the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.errors import MismatchError
from shoal.system.rank_names import name_ranks
from shoal.torch_internals.trees import tree_flatten, tree_leaves
from shoal.torch_support.fingerprint import fingerprint_number

# Enough to tell batches apart, few enough to cost nothing.
_MOST_SAMPLED = 4096
_DEVICES = ("cpu", "cuda")
_PLAIN = (bool, int, float, str, bytes, type(None))


class InputKind(NamedTuple):
    """What is known of inputs before they are used.

    Attributes:
        structure: Decides the route through the model.
        sizes: Decides the shapes of values on the route.
    """

    structure: str
    sizes: str


def kind_of(inputs: Any) -> InputKind:
    """Kinds depend on plain numbers, and not on the numbers in tensors."""
    leaves, spec = tree_flatten(inputs)
    structure = [str(spec)]
    sizes = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            structure.append(f"{leaf.dtype}[{leaf.dim()}]")
            sizes.append(str(tuple(leaf.shape)))
        else:
            structure.append(repr(leaf) if isinstance(leaf, _PLAIN) else str(type(leaf)))
    return InputKind(" ".join(structure), " ".join(sizes))


def mode_of(module: nn.Module) -> str:
    """Which parts train, in which precision, and whether there will be a backward."""
    training = "".join("t" if part.training else "e" for part in module.modules())
    # All devices: ranks may communicate on the CPU and compute on a GPU.
    autocast = {
        device: torch.get_autocast_dtype(device)
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    }
    return f"{fingerprint_number(training)} {torch.is_grad_enabled()} {autocast}"


def check_same_batch(
    group: Backend, kinds: Sequence[InputKind], module: nn.Module, batch: Any
) -> str:
    """Checks that all ranks have the same batch; one collective.

    Returns:
        A text that says which parameters of all ranks require gradients: part of what decides the
        route, and exchanged on the occasion.
    """
    trainable = "".join("1" if p.requires_grad else "0" for p in module.parameters())
    form = "|".join(f"{kind.structure} {kind.sizes}" for kind in kinds)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sample = fingerprint_number(tensors, _MOST_SAMPLED)
    own = [fingerprint_number(form), sample, fingerprint_number(trainable)]
    numbers = group.all_gather(torch.tensor([own], device=group.device)).tolist()
    odd = [rank for rank, number in enumerate(numbers) if number[:2] != numbers[0][:2]]
    if odd:
        shown = "; ".join(kind.sizes for kind in kinds)
        raise MismatchError(
            "the ranks of one pipeline must be given the same batch, inputs and targets; "
            f"{name_ranks(odd)} of it have other shapes or other values than rank 0 "
            f"(here, rank {group.rank}: {shown}). Take a sampler with world=model.data_group"
        )
    return "-".join(str(flags) for *_, flags in numbers)

"""Which inputs take the same way through a model: those alike in structure, and in size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shoal.comm import Backend
from shoal.errors import MismatchError

_PLAIN = (bool, int, float, str, bytes, type(None))


class InputKind(NamedTuple):
    """What decides the way through a model, and what decides shapes on it."""

    structure: str
    sizes: str


def kind_of(inputs: Any) -> InputKind:
    """Numbers in tensors do not count, plain ones do."""
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
    """Which parts train, and whether there will be a backward."""
    training = "".join("t" if part.training else "e" for part in module.modules())
    return _digest([training, str(torch.is_grad_enabled())]).hex()


def agree(group: Backend, kinds: Sequence[InputKind], module: nn.Module) -> str:
    """What all ranks' parameters want of gradients, as a text; and all have the same inputs."""
    wanted = "".join("1" if p.requires_grad else "0" for p in module.parameters())
    own = [_number("|".join(f"{kind.structure} {kind.sizes}" for kind in kinds)), _number(wanted)]
    numbers = group.all_gather(torch.tensor([own], device=group.device)).tolist()
    odd = [rank for rank, (batch, _) in enumerate(numbers) if batch != numbers[0][0]]
    if odd:
        shown = "; ".join(kind.sizes for kind in kinds)
        raise MismatchError(
            "the ranks of one pipeline must be given the same batch; those of "
            f"{', '.join(map(str, odd))} have other shapes or other inputs than rank 0 of it "
            f"(here, rank {group.rank}: {shown}). Take a sampler with world=model.data_group"
        )
    return "-".join(str(flags) for _, flags in numbers)


def _digest(texts: Sequence[str]) -> bytes:
    return hashlib.blake2b("|".join(texts).encode(), digest_size=8).digest()


def _number(text: str) -> int:
    return int.from_bytes(_digest([text]), "little") >> 1

"""How a forward begins: with the same batch and the same random state on all ranks of a group.

The ranks of a tensor group compute every layer together. With different batches each rank would
multiply its part of a weight with other inputs, and the sums would belong to no batch at all. With
different random numbers ranks would drop different activations, or sample different tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.errors import MismatchError
from shoal.torch_internals.trees import tree_leaves
from shoal.torch_support.fingerprint import checksum, fingerprint
from shoal.torch_support.random_state import set_torch_states, torch_states

Seen = list[tuple[str, str, int]]
"""Of each tensor dtype and shape, a fingerprint of a sample, and a checksum of all elements."""


def begin_together(group: Backend, device: torch.device, inputs: Any) -> None:
    """Compares what the ranks were given, and lets all go on with the first one's generators.

    Of tensors shapes, a sample and a sum over all elements are compared, not every element.

    Raises:
        MismatchError: On all ranks of the group, if tensors among the inputs differ.
    """
    seen = [_look_at(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
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


def _look_at(tensor: Tensor) -> tuple[str, str, int]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}", fingerprint(tensor), int(checksum(tensor))


def _described(seen: Seen) -> str:
    return ", ".join(f"{kind} (checksum {total})" for kind, _, total in seen)

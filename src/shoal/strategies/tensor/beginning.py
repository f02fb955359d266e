"""How a forward begins: the ranks of a tensor group have the same batch and the same dice.

They compute every layer together. With different batches each rank would multiply its part of a
weight with something else, and the sums would be numbers that belong to no batch at all. With
different random numbers they would drop different activations, or sample different tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.comm import Backend
from shoal.errors import MismatchError
from shoal.torch_support.random_state import set_torch_states, torch_states

Fingerprint = tuple[tuple[int, ...], str, float]


def begin_together(group: Backend, device: torch.device, inputs: Any) -> None:
    """Compares what the ranks were given, and lets all go on with the first one's generators.

    Of tensors shapes and a sum over all elements are compared, not every element.

    Raises:
        MismatchError: On all ranks of the group, if tensors among the inputs differ.
    """
    seen = [_fingerprint(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    generators = torch_states(device) if group.rank == 0 else []
    answers = group.all_gather_object((seen, generators))
    _check_same([fingerprints for fingerprints, _ in answers])
    if group.rank > 0:
        set_torch_states(answers[0][1], device)


def _check_same(everybody: list[list[Fingerprint]]) -> None:
    odd = next((rank for rank, other in enumerate(everybody) if other != everybody[0]), None)
    if odd is not None:
        raise MismatchError(
            f"the ranks of a tensor group must be given the same batch; ranks 0 and {odd} of the "
            f"group got {_described(everybody[0])} and {_described(everybody[odd])}. Choose the "
            "batch by model.data_group (its rank and size), not by the world: "
            "shoal.sampler(data, batch_size, world=model.data_group)."
        )


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, dtype, and a sum in which places count, the same for the same bits."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    numbers = flat.to(torch.float64)
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device, dtype=torch.float64).sqrt()
    total = float(torch.nan_to_num(numbers).mul(weights).sum()) if len(numbers) else 0.0
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), total


def _described(seen: list[Fingerprint]) -> str:
    return ", ".join(f"{dtype}{list(shape)} (sum {total:.6g})" for shape, dtype, total in seen)

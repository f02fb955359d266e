"""What a model must be to be wrapped."""

from __future__ import annotations

from itertools import zip_longest

from torch import nn
from torch.nn.parameter import is_lazy

from shoal.comm import Backend
from shoal.comm.header import spec
from shoal.errors import MismatchError
from shoal.strategies.arrivals import is_watched


def check_models(module: nn.Module, backend: Backend) -> None:
    """Refuses a model that is wrapped already, on no device, or another than the other ranks'."""
    if any(map(is_lazy, module.parameters())):
        raise ValueError(
            "the model has lazy parameters that have no shape yet: run a batch through it before "
            "it is wrapped, and before its optimizer is made"
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError("the model is on the meta device: give its parameters values first")
    if any(map(is_watched, module.parameters())):
        raise ValueError(
            "the model, or a part of it, is wrapped already: wrap the plain module once and use "
            "what comes back"
        )
    described = [f"{n}: {spec(p.dtype, tuple(p.shape))}" for n, p in module.named_parameters()]
    for rank, other in enumerate(backend.all_gather_object(described)):
        for mine, theirs in zip_longest(described, other, fillvalue="nothing"):
            if mine != theirs:
                raise MismatchError(
                    f"the ranks' models differ: rank {backend.rank} has {mine} where rank {rank} "
                    f"has {theirs}. Build the same model on every rank."
                )

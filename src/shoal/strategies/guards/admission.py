"""What a model must be to be wrapped."""

from __future__ import annotations

from itertools import zip_longest
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.comm import Backend
from shoal.comm.operation.base import spec
from shoal.errors import MismatchError, ShoalError
from shoal.strategies.gradients.arrivals import is_watched


def check_models(module: nn.Module, backend: Backend) -> None:
    """Refuses a model that is wrapped already, on no device, or another than the other ranks'."""
    scripted = [n for n, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise TypeError(
            f"{scripted[0] or 'the model'} was made by torch.jit.script or torch.jit.trace, and "
            "such modules take no hooks, by which shoal sees when a model is used: wrap the plain "
            "module (torch.compile goes with every strategy), and script what you have trained"
        )
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


def check_trains_alike(module: nn.Module, backend: Backend) -> None:
    """Refuses layers that change their parameters in forward, by what a rank's own rows are."""
    if backend.size == 1:
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ShoalError(
                f"{name or 'the model'} is an {type(layer).__name__} with max_norm: forward "
                "shortens the rows that it looks up, on each rank those of its own batch, so the "
                "ranks' parameters would drift apart. Build it without max_norm and shorten all "
                "rows after each step on every rank, as in `with model.full_parameters(), "
                "torch.no_grad(): weight.copy_(torch.renorm(weight, 2, 0, max_norm))`"
            )


def refuse_copy() -> NoReturn:
    """Memory that ranks hold together cannot be copied by one of them."""
    raise ShoalError(
        "a wrapped model, or its module, cannot be copied or pickled: build another module and "
        "load the wrapped model's state_dict() into it"
    )

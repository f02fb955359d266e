"""What a model must be to be wrapped, and to be called afterwards.

[Note: late parameters]
Memory and communication are laid out when a model is wrapped. A parameter that comes later, by
itself or in a new layer, would be trained by each rank alone, without a word. So every forward with
gradients looks for late parameters: not at all names, but whether each module still has the very
parameters and children it had, which takes a tenth of a microsecond each.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, zip_longest
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.comm import Backend
from shoal.comm.operation.base import spec
from shoal.errors import MismatchError, ShoalError
from shoal.torch_internals.autograd import is_forward_mode, surrounding_ddp, transforms
from shoal.torch_internals.modules import buffers_of, children_of, parameters_of
from shoal.torch_internals.tensors import hooks_after_gradient


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
    if any(map(_is_watched, module.parameters())):
        raise ValueError(
            "the model, or a part of it, is wrapped already: wrap the plain module once and use "
            "what comes back"
        )
    _check_apart(module)
    described = [f"{n}: {spec(p.dtype, tuple(p.shape))}" for n, p in module.named_parameters()]
    for rank, other in enumerate(backend.all_gather_object(described)):
        for mine, theirs in zip_longest(described, other, fillvalue="nothing"):
            if mine != theirs:
                raise MismatchError(
                    f"the ranks' models differ: rank {backend.rank} has {mine} where rank {rank} "
                    f"has {theirs}. Build the same model on every rank."
                )


def _check_apart(module: nn.Module) -> None:
    """Refuses parameters that share memory without being one: a step would change both twice."""
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + _span(parameter), name)
        for name, parameter in module.named_parameters()
        if parameter.numel()
    )
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"{name} and {other} share memory, as after {other}.data = {name}.data, but are "
                "two parameters, so an optimizer steps that memory twice. To tie them, have both "
                "modules use one parameter (b.weight = a.weight); to keep them apart, clone one"
            )
    _check_buffers(module, spans)


def _check_buffers(module: nn.Module, spans: Sequence[tuple[int, int, str]]) -> None:
    """Refuses buffers in the memory of parameters: it is not where these are trained."""
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    for buffer_name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided or not buffer.numel():
            continue
        stop = buffer.data_ptr() + _span(buffer)
        before = bisect.bisect_left(spans, (stop, 0, "")) - 1  # the last that begins below
        if before >= 0 and buffer.data_ptr() < spans[before][1] and spans[before][2] in trained:
            name = spans[before][2]
            raise ValueError(
                f"the buffer {buffer_name} is in the memory of the parameter {name}, which gets "
                "memory of the strategy's choice: the buffer would no longer follow it. Use the "
                f"parameter itself in its place, or register a clone, {name}.detach().clone()"
            )


def _span(parameter: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    steps = [(n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True)]
    return (sum(steps) + 1) * parameter.itemsize


def _is_watched(parameter: nn.Parameter) -> bool:
    """Whether the hook of an engine that still exists is on it."""
    hooks = hooks_after_gradient(parameter) or {}
    owners = [getattr(hook, "owner", None) for hook in hooks.values()]
    return any(owner is not None and owner() is not None for owner in owners)


def check_trains_alike(module: nn.Module, backend: Backend) -> None:
    """Refuses layers whose parameters or gradients depend on which rows a rank has to itself."""
    if backend.size == 1:
        return
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.scale_grad_by_freq:
            raise ShoalError(
                f"{name or 'the model'} is an {type(layer).__name__} with scale_grad_by_freq: "
                "gradients of rows are divided by how often they occur in the batch, on each rank "
                "in its own part of it, so training would not be that of one process. Build it "
                "without scale_grad_by_freq"
            )
        if layer.max_norm is not None:
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


class ParameterRoster:
    """The parameters and children of all parts of a module."""

    def __init__(self, module: nn.Module, is_known: Callable[[nn.Parameter], bool]) -> None:
        """``is_known``: whether a parameter is one of those that ranks train together."""
        self._module, self._is_known = module, is_known
        self._note()

    def _note(self) -> None:
        parts = list(self._module.modules())
        self._members = [
            members.values()
            for part in parts
            for members in (parameters_of(part), children_of(part))
        ]
        self._buffers = [buffers_of(part) for part in parts]
        self._known = self._present()

    def _present(self) -> list[Any]:
        return list(chain.from_iterable(self._members))

    def _is_unchanged(self) -> bool:
        present = self._present()
        return len(present) == len(self._known) and all(map(is_, present, self._known))

    def buffers(self) -> list[Tensor]:
        """All buffers of the module; to find that it has none takes no walk through it."""
        if self._is_unchanged() and not any(self._buffers):
            return []
        return list(self._module.buffers())

    def check(self) -> None:
        """Raises if there is a parameter that was not there; see [Note: late parameters]."""
        if self._is_unchanged():
            return
        found = list(self._module.named_parameters())
        if not all(isinstance(parameter, nn.Parameter) for _, parameter in found):
            return  # `torch.func.functional_call` has put tensors of its caller's in their place
        late = [name for name, parameter in found if not self._is_known(parameter)]
        if late:
            more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
            raise ShoalError(
                f"the parameter {late[0]}{more} was added to the model, or put in the place of "
                "another, after the model was wrapped: it would be trained by each rank alone. "
                "Change the plain module first, build the optimizer, then wrap both"
            )
        self._note()


def refuse_surrounding_ddp() -> None:
    """Refuses a forward inside of torch's `DistributedDataParallel`, which takes gradients too."""
    if surrounding_ddp() is not None:
        raise ShoalError(
            "a model that shoal.as_distributed wrapped was called inside of torch's "
            "DistributedDataParallel: both would average its gradients, and the optimizer would "
            "step with neither. Leave DistributedDataParallel out: the wrapped model takes its "
            "place"
        )


def check_forward_mode(backend: Backend) -> None:
    """Refuses forward mode where parameters are gathered: it would fail in torch, without advice.

    Inside of `torch.func.jvp` nothing can be copied into parameters. The level of
    `torch.autograd.forward_ad` is one for all threads of a process, and so for all ranks of it.
    """
    is_jvp = "Jvp" in transforms()
    is_dual = is_forward_mode() and backend.name == "memory"
    if is_jvp or is_dual:
        what = "torch.func.jvp" if is_jvp else "torch.autograd.forward_ad over 'memory'"
        raise ShoalError(
            f"forward-mode differentiation ({what}) does not go with parameters that are gathered "
            "while they are used: choose strategy 'ddp', 'zero1' or 'zero2', or 'zero3' over "
            "shared memory, where nothing is gathered"
        )


def is_transforming() -> bool:
    """Whether forward is inside of `torch.func.grad` or the like, which leaves no gradients."""
    return any(each != "Vmap" for each in transforms())

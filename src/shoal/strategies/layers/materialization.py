"""Models that were built on the meta device get memory, and the values their layers begin with.

[Note: order of initialisation]
Children come before their parents, and siblings in the order of registration, as in
`torch.nn.Module.apply`. Constructors run in that order too: what calls ``reset_parameters`` when
it is built gets the numbers it would have got there, after ``torch.manual_seed(seed)``. A tensor
that several modules share is set by each of them, so the last one counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.errors import ShoalError
from shoal.strategies.engine.admission import check_models
from shoal.strategies.layers.buffers import share_buffers
from shoal.torch_internals.modules import RESETS
from shoal.torch_internals.tensors import hooks_after_gradient, hooks_before_gradient, version_of
from shoal.torch_support.random_state import RandomState


def materialize(module: nn.Module, device: torch.device, seed: int) -> None:
    """Gives everything on the meta device memory and its first values.

    The memory is where the rest of the model is, or on ``device`` if nothing has any. Parameters
    and buffers stay the objects they are, so ties hold and an optimizer that was built for them
    still has them. What has values keeps them. The generators of torch, numpy and Python are
    afterwards as before.

    Example:
        >>> with torch.device("meta"):
        ...     layer = nn.Linear(2, 2)
        >>> materialize(layer, torch.device("cpu"), seed=0)
        >>> torch.manual_seed(0)
        >>> torch.equal(layer.weight, nn.Linear(2, 2).weight)
        True
    """
    if not any(tensor.is_meta for tensor in _tensors(module)):
        return
    device = next((t.device for t in _tensors(module) if not t.is_meta), device)
    outside = RandomState.capture()
    try:
        _seed(seed, device)
        with torch.no_grad():
            _Materialization(module, device).carry_out()
    finally:
        outside.restore()


def share_values(module: nn.Module, backend: Backend, seed: int) -> None:
    """All ranks get the first rank's parameters and buffers, before a model is cut or split."""
    materialize(module, backend.device, seed)
    check_models(module, backend)
    for parameter in module.parameters():
        backend.broadcast(parameter.data)
    share_buffers(module.buffers(), backend)


class _Materialization:
    """One model on its way from the meta device to another."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._absent = {id(tensor) for tensor in _tensors(module) if tensor.is_meta}
        self._versions: dict[int, int] = {}

    def carry_out(self) -> None:
        """Module by module: memory, then values."""
        for module, owner in _children_first(self._module, None, set()):
            if any(id(tensor) in self._absent for tensor in _tensors(module)):
                self._allocate(module)
                self._initialize(module, owner)
        self._check()

    def _allocate(self, module: nn.Module) -> None:
        own = [tensor for tensor in _tensors(module, recurse=False) if tensor.is_meta]
        if own:
            # Not a loop over ``own``: some modules (recurrent ones) have to put things in order.
            module._apply(self._with_memory, recurse=False)
        for tensor in own:
            self._versions[id(tensor)] = version_of(tensor)

    def _with_memory(self, tensor: Tensor) -> Tensor:
        """The same object, with memory that is marked as not set yet."""
        if not tensor.is_meta:
            return tensor
        memory = torch.full_like(tensor, _mark(tensor.dtype), device=self._device)
        if isinstance(tensor, nn.Parameter):
            memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
        memory.__class__ = type(tensor)
        memory.__dict__.update(vars(tensor))
        # transformers would take this for loaded, and leave it as it is.
        memory.__dict__.pop("_is_hf_initialized", None)
        _swap(tensor, memory)
        return tensor

    def _initialize(self, module: nn.Module, owner: Any) -> None:
        """Calls what sets the module's tensors; those that had values before keep them."""
        kept = [(t, t.clone()) for t in _tensors(module) if id(t) not in self._absent]
        if owner is not None:
            owner._init_weights(module)
        reset = _reset(module)
        if reset is not None and (owner is None or self._unset(module)):
            reset()
        for tensor, value in kept:
            tensor.copy_(value)

    def _unset(self, module: nn.Module) -> list[str]:
        """The module's own tensors that have no values yet."""
        unset = [name for name, tensor in _named(module) if self._is_unset(tensor)]
        attributes = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
        return unset + [name for name in attributes if vars(module)[name].is_meta]

    def _is_unset(self, tensor: Tensor) -> bool:
        if id(tensor) not in self._absent or not tensor.numel():
            return False
        if tensor.is_floating_point() or tensor.is_complex():
            return bool(tensor.isnan().any())
        is_marked = bool((tensor == _mark(tensor.dtype)).all())
        return is_marked and version_of(tensor) == self._versions[id(tensor)]

    def _check(self) -> None:
        for name, module in self._module.named_modules():
            unset = self._unset(module)
            if unset:
                has_reset = _reset(module) is not None
                how = "its reset_parameters() does not set" if has_reset else "nothing sets"
                raise ValueError(
                    f"the model is on the meta device, and {how} {', '.join(unset)} of "
                    f"{name or 'the model itself'} ({type(module).__name__}): give that class a "
                    "reset_parameters() that sets all its parameters and buffers, or build it on "
                    "a device with memory"
                )


def _seed(seed: int, device: torch.device) -> None:
    # Not torch.manual_seed: it would also seed devices that are not in use yet, once they are.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _children_first(
    module: nn.Module, owner: Any, seen: set[int]
) -> Iterator[tuple[nn.Module, Any]]:
    """Every module once, with the Hugging Face model it is part of, which initialises it."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        owner = module
    for child in module.children():
        yield from _children_first(child, owner, seen)
    yield module, owner


def _reset(module: nn.Module) -> Callable[..., object] | None:
    found = (getattr(module, name, None) for name in RESETS)
    return next(filter(callable, found), None)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    own = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return chain.from_iterable(own)


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))


def _mark(dtype: torch.dtype) -> float | int | bool:
    """What memory is filled with until it is set."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _swap(tensor: Tensor, memory: Tensor) -> None:
    if hooks_before_gradient(tensor) or hooks_after_gradient(tensor):
        raise ShoalError(
            f"a parameter of shape {tuple(tensor.shape)} on the meta device has hooks, which would "
            "be lost when it gets memory: hang them on after the model is wrapped"
        )
    try:
        torch.utils.swap_tensors(tensor, memory)
    except RuntimeError as error:
        raise ShoalError(
            f"a tensor of shape {tuple(tensor.shape)} on the meta device cannot get memory because "
            f"something else holds on to it: wrap the model before it is used. ({error})"
        ) from error

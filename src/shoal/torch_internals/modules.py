"""Modules: what they hold themselves, what is called with them, and classes without public name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.utils.stateless import _reparametrize_module

__all__ = ["BatchNorm", "Dropout", "IncompatibleKeys"]

EXTRA_STATE = "_extra_state"  # ends the names of what `get_extra_state` returns, in a state_dict
# Methods that initialise a module's own parameters; the second is that of attention.
RESETS = ("reset_parameters", "_reset_parameters")
OWN_PARAMETERS = "_parameters"
CALL = "_call_impl"  # the method behind `module(...)`, unless the module is compiled
COMPILED_CALL = "_compiled_call_impl"  # and that of a module that was compiled in place


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict of a module's own parameters; changing it changes the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict of a module's own buffers; changing it changes the module."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict of a module's own submodules."""
    return module._modules


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a module's own buffer belongs to its `state_dict`."""
    return name not in module._non_persistent_buffers_set


def named_members(
    module: nn.Module,
    members_of: Callable[[nn.Module], Iterator[tuple[str, Any]]],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Lists members with their full names, as `named_parameters` lists parameters."""
    members: Iterator[tuple[str, Any]]
    members = module._named_members(members_of, prefix, recurse, remove_duplicate=remove_duplicate)
    return members


def hooks_of(module: nn.Module) -> list[Any]:
    """What is called before or after a module's forward or backward."""
    kinds = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for kind in kinds for hook in kind.values()]


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What is called after `module.compile()`; None before it."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is a result of `torch.compile`, or was compiled in place."""
    return hasattr(module, "_orig_mod") or compiled_call(module) is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """What `torch.compile` was given, if the module is a result of it."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def with_parameters(
    module: nn.Module, parameters: dict[str, Tensor]
) -> AbstractContextManager[None]:
    """A context in which a module uses other tensors; tied parameters stay tied."""
    context: AbstractContextManager[None]
    context = _reparametrize_module(module, parameters, tie_weights=True)
    return context


def check_input_dim(layer: BatchNorm, batch: Tensor) -> None:
    """Raises a layer's own error for a batch with another number of dimensions."""
    layer._check_input_dim(batch)


def feed_forward(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The second half of an encoder's or decoder's layer, as a method."""
    method: Callable[[Tensor], Tensor] = layer._ff_block  # type: ignore[assignment]
    return method


def has_one_projection(attention: nn.MultiheadAttention) -> bool:
    """Whether queries, keys and values are projected by one weight, `in_proj_weight`."""
    is_one: bool = attention._qkv_same_embed_dim
    return is_one


def additive_mask(mask: Tensor | None, name: str, dtype: torch.dtype) -> Tensor | None:
    """A mask of attention as numbers to be added, with torch's own errors for wrong ones."""
    return nn.functional._canonical_mask(
        mask=mask,
        mask_name=name,
        other_type=None,
        other_name="",
        target_type=dtype,
        check_other=False,
    )

"""Tensors: what they count, where they lie, and how subclasses of them are made."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = ["DispatchMode"]  # a mode that sees every operation, also those inside of others

# A context in which subclasses of tensors are taken for tensors: no `__torch_function__` is called.
as_plain_tensors = torch._C.DisableTorchFunctionSubclass
# The same, and modes see nothing either.
without_torch_function = torch._C.DisableTorchFunction
# The `__torch_function__` of a subclass that works by `__torch_dispatch__` alone.
no_torch_function: Any = torch._C._disabled_torch_function_impl

# Attributes of a tensor that tell nothing about its values.
ATTRIBUTES_WITHOUT_VALUES = frozenset(
    {"_version", "_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks"}
)
# Attributes of a tensor that give access to its memory.
ATTRIBUTES_OF_MEMORY = frozenset({"_typed_storage"})

# Writes into tensors while what autograd saved of them stays valid.
keeping_version = torch.autograd._unsafe_preserve_version_counter

# Copies a list of tensors into another one; the norm of every tensor of a list.
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm


def version_of(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to in place."""
    return tensor._version


Versioned = tuple[Tensor, int]
"""A tensor that autograd needs in backward, and how often it had been written to when saved.

Autograd makes this check itself, but not where hooks pack what it saves.
"""


def versioned(tensor: Tensor) -> Versioned:
    """A tensor as it is now."""
    return tensor, tensor._version


def is_versioned(packed: object) -> TypeGuard[Versioned]:
    """Whether this is what `versioned` makes, and nothing that another hook has packed."""
    return type(packed) is tuple and len(packed) == 2 and isinstance(packed[0], Tensor)


def unchanged(saved: Versioned) -> Tensor:
    """The tensor, unless it was written to since."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, saved at version "
            f"{version}, is at version {tensor._version}. Write to a copy of it instead, or after "
            "backward"
        )
    return tensor


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each of some tensors, or what shares its memory, was written to in place."""
    return [tensor._version for tensor in tensors]


def sum_of_versions(tensors: Iterable[Tensor]) -> int:
    """Grows whenever any of the tensors is written to."""
    # This is on the path of every step, as is what is above: no call for each tensor.
    return sum([tensor._version for tensor in tensors])


def storage_id(tensor: Tensor) -> int:
    """Identifies a tensor's memory while that exists; tensors without memory have one too.

    Of a sparse tensor it is that of its values.
    """
    identity: int = _dense_parts(tensor)[0].untyped_storage()._cdata
    return identity


def storage_bytes(tensor: Tensor) -> int:
    """All of the memory behind a tensor, also where it is a view."""
    return sum(part.untyped_storage().nbytes() for part in _dense_parts(tensor))


_INDICES = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The values first."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    if tensor.layout in _INDICES:
        return tensor.values(), *(part(tensor) for part in _INDICES[tensor.layout])
    return (tensor,)


class WeakStorage(StorageWeakRef):
    """Does not keep a tensor's memory; while it exists, no other memory has its `storage_id`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def num_storage_users(tensor: Tensor) -> int:
    """How many tensors, on the Python side or in autograd's graph, use a tensor's memory."""
    return num_users(tensor.untyped_storage()._cdata)


def num_users(storage: int) -> int:
    """The same for memory that is known by its `storage_id`; it may differ by one, always."""
    count: int = torch._C._storage_Use_Count(storage)
    return count


def hooks_before_gradient(parameter: Tensor) -> MutableMapping[int, Any]:
    """What `register_hook` has put on a tensor, by the handle's id and in order."""
    hooks: MutableMapping[int, Any] | None = parameter._backward_hooks
    return {} if hooks is None else hooks


def hooks_after_gradient(parameter: Tensor) -> MutableMapping[int, Any]:
    """What `register_post_accumulate_grad_hook` has put on one, by the handle's id, in order."""
    # Plain tensors get the attribute with their first hook; a dict that exists is never copied.
    hooks: MutableMapping[int, Any] | None
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


def make_wrapper(kind: type[Tensor], shape: torch.Size, **options: Any) -> Any:
    """A tensor of a subclass with a shape and a dtype, but without memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, **options)


def allow_in_foreach(kind: type[Tensor]) -> None:
    """Lets torch hand lists of a subclass to its foreach operators, instead of one by one."""
    types: list[Any] = _foreach_utils._foreach_supported_types
    if kind not in types:
        types.append(kind)


def schema_of(operation: Any) -> torch.FunctionSchema:
    """An operator's arguments with their names and which of them it writes to."""
    schema: torch.FunctionSchema = operation._schema
    return schema


def detached_below_autograd(tensor: Tensor) -> Tensor:
    """For modes that see operations below autograd: without a graph, and written to together."""
    # Without the guard, the two would count their changes in place apart from each other.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()

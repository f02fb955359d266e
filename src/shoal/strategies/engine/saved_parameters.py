"""What autograd saves of sharded parameters between forward and backward: where they lie.

[Note: saved parameters]
Autograd would keep the memory of a gathered parameter alive until backward. So hooks save its
group, offset and shape instead, and backward gathers the group again. A parameter that has new
values by then is an error, as it is in plain PyTorch: each change starts a new *generation*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shoal.strategies.engine.flat_group import FlatGroup
from shoal.torch_internals.autograd import has_saved_tensors_hooks
from shoal.torch_internals.tensors import storage_id


class SavedParameters:
    """Hooks on what autograd saves of one model's sharded parameters."""

    def __init__(self, need: Callable[[FlatGroup], None]) -> None:
        """``need`` gathers a group."""
        self._need = need
        self._by_storage: dict[int, FlatGroup] = {}
        self._generation = self._all_changed = 0
        self._changed: dict[tuple[int, int], int] = {}
        self._packing: Callable[[Tensor], object] = self._pack

    def note_whole(self, group: FlatGroup) -> None:
        """The group has a whole, whose memory is known from now on."""
        self._by_storage[_storage_id(group.whole)] = group

    def forget_whole(self, group: FlatGroup) -> None:
        """The group's whole is about to be freed."""
        self._by_storage.pop(_storage_id(group.whole), None)

    def changed(self, parameters: Iterable[tuple[int, int]]) -> None:
        """Some parameters, by group and index in it, have new values."""
        self._generation += 1
        self._changed.update(dict.fromkeys(parameters, self._generation))

    def everything_changed(self) -> None:
        """All parameters may have new values."""
        self._generation += 1
        self._all_changed = self._generation

    def saving(self) -> saved_tensors_hooks:
        """While this is on, what autograd saves of sharded parameters is gathered when needed."""
        return saved_tensors_hooks(self._packing, self._unpack)

    def watching(self) -> AbstractContextManager[Any]:
        """Around one use of a parameter, where other hooks do not decide what is saved."""
        return nullcontext() if is_saving() else self.saving()

    def hide_from_compiler(self) -> None:
        """For models with compiled parts: `torch.compile` leaves alone what is done with them."""
        self._packing = torch.compiler.disable(self._pack)

    def _pack(self, tensor: Tensor) -> object:
        group = self._by_storage.get(_storage_id(tensor))
        if group is None or tensor.dtype is not group.whole.dtype or tensor.is_conj():
            return tensor
        return _Saved(
            group, self._generation, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, _Saved):
            return packed  # type: ignore[return-value]
        if packed.generation != self._generation and self._is_old(packed):
            raise RuntimeError(
                "backward needs parameters that were changed after forward used them, by an "
                "optimizer's step or by hand: run forward again before this backward"
            )
        self._need(packed.group)
        return packed.group.whole.as_strided(packed.shape, packed.stride, packed.offset)

    def _is_old(self, packed: _Saved) -> bool:
        slots = packed.group.layout.slots
        index = bisect_right(slots, packed.offset, key=lambda slot: slot.start) - 1
        changed = self._changed.get((packed.group.index, index), 0)
        return max(changed, self._all_changed) > packed.generation


def is_saving() -> bool:
    """Whether hooks decide what autograd saves: ours in forward, or those of recomputation."""
    return has_saved_tensors_hooks()


def _storage_id(tensor: Tensor) -> int:
    """Tells the memory of a tensor from any other."""
    identity: int = storage_id(tensor)
    return identity


class _Saved(NamedTuple):
    """What autograd keeps of a sharded parameter: where it lies, not its memory."""

    group: FlatGroup
    generation: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

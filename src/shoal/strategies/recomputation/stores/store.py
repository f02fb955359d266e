"""Where what blocks keep for backward lies.

[Note: moved memory]
A store takes tensors in forward and gives what stands for them; in backward it gives the tensors
back. What moves is the memory behind a tensor, once, however many blocks or views have it, so that
views come back as views and kernels find the strides that they had. What a store does not take
stays as it is, and it is an error if it is written to.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.torch_internals.autograd import top_saved_tensors_hooks
from shoal.torch_internals.tensors import (
    WeakStorage,
    is_versioned,
    storage_bytes,
    storage_id,
    unchanged,
    version_of,
    versioned,
)


class Store:
    """The store of this rank's own memory, which moves nothing; and what others have to offer."""

    moves = False
    """Whether it takes anything at all."""
    takes_products = False
    """Whether it takes what only this rank has, besides the inputs of blocks."""

    def put(self, tensor: Tensor, place: str) -> Any:
        """What stands for a tensor; ``place`` is the same in every call, and on every rank."""
        return tensor

    def get(self, kept: Any) -> Any:
        """The tensor that was put in; what does not stand for a tensor comes back as it is."""
        return kept

    def held(self, kept: Any) -> Tensor | None:
        """What lies in this rank's memory for it."""
        return kept if isinstance(kept, Tensor) else None

    def begin_call(self) -> None:
        """A block is called, and what is put in now is needed back at once."""

    def describe(self) -> str:
        """Where what is kept lies, as the end of a sentence."""
        return ""


class MovedMemory:
    """Memory that is elsewhere, for as long as a graph needs it; see [Note: moved memory]."""

    def __init__(self, tensor: Tensor) -> None:
        # While this exists, no other memory has the same identity.
        self._weak, self.version = WeakStorage(tensor), version_of(tensor)
        self.device = tensor.device
        self.source: Tensor | None = tensor.detach()
        """What was put in, for a store that copies it in the background."""
        self.place: Any = None
        """Where it is now; the store's own matter."""
        self.here: Tensor | None = None
        """All bytes, once they are back for good."""


class BlockCall:
    """One call of a block, for as long as something stands for what it has put in."""

    def __init__(self, before: BlockCall | None) -> None:
        """``before``: the call before it, of any block."""
        self._before = None if before is None else weakref.ref(before)
        self._memories: list[weakref.ref[MovedMemory]] = []

    @property
    def before(self) -> BlockCall | None:
        """None if nothing stands for it any more."""
        return None if self._before is None else self._before()

    def add(self, memory: MovedMemory) -> None:
        """It needs this memory in backward."""
        self._memories.append(weakref.ref(memory))

    def memories(self) -> Iterator[MovedMemory]:
        """What it needs still."""
        return filter(None, [each() for each in self._memories])


class Moved(NamedTuple):
    """What stands for a tensor: its memory, its view of that, and the call that needs it."""

    memory: MovedMemory
    call: BlockCall
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, whole: Tensor) -> Tensor:
        """The tensor, in bytes that are back."""
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=whole.device)
            return empty.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)


class MovingStore(Store):
    """A store that moves memory."""

    moves = True
    copies_later = False
    """Whether memory is still read after `move`."""
    stays_back = True
    """Whether memory that is back stays until the graph is gone, as it would have."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, MovedMemory] = weakref.WeakValueDictionary()
        self._call = BlockCall(None)

    @abstractmethod
    def move(self, memory: MovedMemory, data: Tensor, place: str) -> bool:
        """Takes all bytes of some memory, or nothing at all."""

    @abstractmethod
    def fetch(self, memory: MovedMemory) -> Tensor:
        """All bytes, in memory of their own."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory may be moved."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return is_plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta)

    def begin_call(self) -> None:
        """What is put in from now on belongs to it."""
        self._call = BlockCall(self._call)

    def put(self, tensor: Tensor, place: str) -> Any:
        """Moves the tensor's memory, unless that was done before."""
        if not tensor.numel() or not self.takes(tensor):
            return tensor
        memory = self._known.get(storage_id(tensor))
        if memory is None or memory.version != version_of(tensor):
            memory = MovedMemory(tensor)
            with torch.no_grad():
                data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                if not self.move(memory, data.set_(tensor.untyped_storage()), place):
                    return tensor
            if not self.copies_later:
                memory.source = None
            self._known[storage_id(tensor)] = memory
        self._call.add(memory)
        stride, offset = tensor.stride(), int(tensor.storage_offset())
        return Moved(memory, self._call, tensor.dtype, tensor.shape, stride, offset)

    def get(self, kept: Any) -> Any:
        """The tensor, in memory that was fetched."""
        if not isinstance(kept, Moved):
            return kept
        if kept.memory.here is not None:
            return kept.view(kept.memory.here)
        whole = self.fetch(kept.memory)
        if self.stays_back:
            kept.memory.here = whole
        return kept.view(whole)


class _Hooks(saved_tensors_hooks):
    """Sees what autograd saves; hooks that are there already, as those of parameters, go first."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        outer = top_saved_tensors_hooks()

        def pack_both(tensor: Tensor) -> Any:
            packed = tensor if outer is None else outer[0](tensor)
            if is_versioned(packed):
                packed, _ = packed
            return pack(packed) if isinstance(packed, Tensor) else packed

        def unpack_both(kept: Any) -> Any:
            packed = unpack(kept)
            return packed if outer is None else outer[1](packed)

        super().__init__(pack_both, unpack_both)


class Moving(_Hooks):
    """Around a block that keeps everything: what autograd saves goes to a store."""

    def __init__(self, store: Store, own: Collection[int], place: str) -> None:
        """``own``: memory that is there anyway; ``place``: the block's name."""

        def pack(tensor: Tensor) -> Any:
            kept = tensor if storage_id(tensor) in own else store.put(tensor, place)
            return versioned(kept) if isinstance(kept, Tensor) else kept

        def unpack(kept: Any) -> Any:
            return unchanged(kept) if is_versioned(kept) else store.get(kept)

        super().__init__(pack, unpack)


class Counting(_Hooks):
    """Counts the memory that autograd saves, each once."""

    def __init__(self, own: Collection[int]) -> None:
        """``own``: memory that does not count."""
        self._seen: dict[int, int] = dict.fromkeys(own, 0)
        self.is_paused = False

        def pack(tensor: Tensor) -> Any:
            if not self.is_paused:
                self._seen.setdefault(storage_id(tensor), storage_bytes(tensor))
            return versioned(tensor)

        super().__init__(pack, lambda kept: unchanged(kept) if is_versioned(kept) else kept)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """The memory of these is counted elsewhere."""
        self._seen |= {storage_id(each): 0 for each in tensors}

    @property
    def num_bytes(self) -> int:
        """So far."""
        return sum(self._seen.values())


def own_storages(module: nn.Module) -> set[int]:
    """The memory of parameters and buffers, which is there anyway."""
    return {storage_id(each) for each in (*module.parameters(), *module.buffers())}

"""What blocks of a model on a GPU keep lies in host memory, copied while the GPU computes."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.strategies.recomputation.stores.store import MovedMemory, MovingStore
from shoal.torch_internals.tensors import version_of

# Pinned memory has a price for each piece; less than this is not worth it.
_SMALL_BYTES = 1 << 16


@dataclass
class _OnHost:
    """Bytes in pinned memory, and what is under way."""

    bytes: Tensor
    device: torch.device
    left: torch.cuda.Event
    is_damaged: bool = False
    coming: tuple[Tensor, torch.cuda.Event] | None = None


class HostStore(MovingStore):
    """Copies to pinned memory and back on streams of their own.

    The memory on the GPU is let go of when its copy is through. As soon as backward asks for what
    one call of a block has kept, what the call before it has kept begins to come back.
    """

    takes_products = copies_later = True

    def __init__(self, device: torch.device) -> None:
        """``device``: the model's; nothing moves if that is the CPU."""
        super().__init__()
        self.moves = device.type == "cuda"
        if self.moves:
            self._leaving_stream, self._coming_stream = (
                torch.cuda.Stream(device),
                torch.cuda.Stream(device),
            )
        self._leaving: deque[MovedMemory] = deque()
        self._calls: dict[int, list[weakref.ref[MovedMemory]]] = {}

    def takes(self, tensor: Tensor) -> bool:
        """What lies on a GPU, if it is worth it."""
        return tensor.is_cuda and tensor.nbytes >= _SMALL_BYTES and super().takes(tensor)

    def move(self, memory: MovedMemory, data: Tensor, place: str) -> bool:
        """Begins the copy."""
        self._let_go()
        stream = self._leaving_stream
        stream.wait_stream(torch.cuda.current_stream(data.device))
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        left = torch.cuda.Event()
        with torch.cuda.stream(stream):
            host.copy_(data, non_blocking=True)
            left.record(stream)
        memory.place = _OnHost(host, data.device, left)
        self._leaving.append(memory)
        self._calls.setdefault(memory.call, []).append(weakref.ref(memory))
        return True

    def _let_go(self) -> None:
        """Of memory on the GPU whose copy is through.

        A write to it in the meantime may be in the copy. Autograd would not take it either.
        """
        while self._leaving and self._leaving[0].place.left.query():
            memory = self._leaving.popleft()
            assert memory.source is not None
            memory.place.is_damaged = version_of(memory.source) != memory.version
            memory.source = None

    def fetch(self, memory: MovedMemory) -> Tensor:
        """Waits for the bytes, on the GPU; those of the call before are under way from now on."""
        self._let_go()
        whole, back = self._bring(memory)
        for other in self._calls.pop(memory.call - 1, ()):
            if (each := other()) is not None and each.here is None:
                self._bring(each)
        torch.cuda.current_stream(whole.device).wait_event(back)
        return whole

    def _bring(self, memory: MovedMemory) -> tuple[Tensor, torch.cuda.Event]:
        place: _OnHost = memory.place
        if place.is_damaged:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation while it was copied to host memory"
            )
        if place.coming is None:
            stream = self._coming_stream
            whole = torch.empty(place.bytes.shape, dtype=place.bytes.dtype, device=place.device)
            # The allocator may hand out memory that work before this still uses.
            stream.wait_stream(torch.cuda.current_stream(place.device))
            stream.wait_event(place.left)
            back = torch.cuda.Event()
            with torch.cuda.stream(stream):
                whole.copy_(place.bytes, non_blocking=True)
                back.record(stream)
            whole.record_stream(stream)
            place.coming = (whole, back)
        return place.coming

    def describe(self) -> str:
        """One line."""
        if self.moves:
            return "; what is kept lies in host memory"
        return "; the model is in host memory already, so nothing moves"

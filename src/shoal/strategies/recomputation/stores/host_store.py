"""What blocks of a model on a GPU keep lies in host memory, copied while the GPU computes.

[Note: memory that leaves a GPU]
The host waits for no copy. When a block is called, the stream that computes waits for the copies of
the call before the last one, and then their memory is let go of: torch gives it to what that stream
computes next. So two calls' activations are on the GPU at most, and where copies take longer than
computing, the GPU waits for them. In backward, what a call has kept begins to come back while the
call behind it is computed. What has not left yet is used where it is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.strategies.recomputation.stores.copy_streams import CopyStream, PinnedMemory
from shoal.strategies.recomputation.stores.store import BlockCall, Moved, MovedMemory, MovingStore
from shoal.torch_internals.tensors import version_of

# Each copy has a price; less than this is not worth it.
_SMALL_BYTES = 1 << 16


@dataclass
class _OnHost:
    """Bytes in pinned memory, and what is under way.

    Attributes:
        bytes: All of the memory.
        home: The stream whose memory this is on the GPU.
        last: The end of the last copy.
        is_damaged: Whether somebody may have written to the memory while it was copied.
        back: The bytes on the GPU again.
        is_awaited: Whether the stream that has the memory of ``back`` has waited for the copy.
    """

    bytes: Tensor
    home: torch.cuda.Stream
    last: torch.cuda.Event
    is_damaged: bool = False
    back: Tensor | None = None
    is_awaited: bool = False


class HostStore(MovingStore):
    """Copies to pinned memory and back; see [Note: memory that leaves a GPU]."""

    takes_products = copies_later = True
    stays_back = False  # `fetch` has each stream wait that wants it

    def __init__(self, device: torch.device) -> None:
        """``device``: the model's; nothing moves if that is the CPU."""
        super().__init__()
        self.moves = device.type == "cuda"
        if self.moves:
            self._out, self._in = CopyStream(device), CopyStream(device)
        self._pinned = PinnedMemory()
        self._leaving: list[tuple[BlockCall, MovedMemory]] = []
        self._at: BlockCall | None = None

    def takes(self, tensor: Tensor) -> bool:
        """What lies on a GPU, if it is worth it."""
        return tensor.is_cuda and tensor.nbytes >= _SMALL_BYTES and super().takes(tensor)

    def begin_call(self) -> None:
        """Lets go of what the call before the last one has put in."""
        super().begin_call()
        self._let_go(self._call, self._call.before)

    def _let_go(self, *kept: BlockCall | None) -> None:
        """Of what is on the GPU, except for that of some calls."""
        leaving, self._leaving = self._leaving, []
        for call, memory in leaving:
            if call in kept:
                self._leaving.append((call, memory))
            else:
                memory.place.home.wait_event(memory.place.last)
                memory.place.is_damaged = _is_changed(memory)
                memory.source = None

    def move(self, memory: MovedMemory, data: Tensor, place: str) -> bool:
        """Begins the copy."""
        pinned, after = self._pinned.take(data.numel())
        copied = self._out.copy(pinned, data, after)
        memory.place = _OnHost(pinned, self._out.current(), copied)
        self._leaving.append((self._call, memory))
        weakref.finalize(memory, self._end, memory.place).atexit = False
        return True

    def get(self, kept: Any) -> Any:
        """The tensor; what its call and the one before have put in is on its way from now on."""
        if isinstance(kept, Moved) and kept.call is not self._at:
            self._at, before = kept.call, kept.call.before
            self._let_go(kept.call, before)
            for memory in (*kept.call.memories(), *(before.memories() if before else ())):
                self._bring(memory)
        return super().get(kept)

    def _bring(self, memory: MovedMemory) -> None:
        """Begins the copy back, unless it is on the GPU anyway."""
        place: _OnHost = memory.place
        if memory.source is None and place.back is None:
            back = torch.empty(place.bytes.shape, dtype=torch.uint8, device=memory.device)
            place.home, after = self._in.current(), [place.last]
            place.back, place.last = back, self._in.copy(back, place.bytes, after)

    def fetch(self, memory: MovedMemory) -> Tensor:
        """Has the GPU wait for the bytes."""
        place: _OnHost = memory.place
        if place.is_damaged or _is_changed(memory):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation while it was copied to host memory"
            )
        if memory.source is not None:
            return memory.source
        self._bring(memory)
        assert place.back is not None
        stream = self._in.current()
        stream.wait_event(place.last)
        if stream == place.home:
            place.is_awaited = True
        else:
            place.back.record_stream(stream)
        return place.back

    def _end(self, place: _OnHost) -> None:
        """No graph needs it any more."""
        if place.back is not None and not place.is_awaited:
            self._in.outlast(place.back)
        self._pinned.give_back(place.bytes, place.last)

    def describe(self) -> str:
        """One line."""
        if self.moves:
            return "; what is kept lies in host memory"
        return "; the model is in host memory already, so nothing moves"


def _is_changed(memory: MovedMemory) -> bool:
    return memory.source is not None and version_of(memory.source) != memory.version

"""Memory of messages that are under way, used again and again.

Fresh pages cost more than the copy into them, and a receiver that has mapped a piece once finds
it again at once.
"""

from __future__ import annotations

from torch import Tensor

from shoal.comm.shm.segments import Arena

_MOST_IDLE_BYTES = 64 << 20
_SMALLEST_BYTES = 256


class MessageMemory:
    """Pieces of an arena for messages whose tensors are not in shared memory already."""

    def __init__(self, arena: Arena) -> None:
        """Nothing is kept yet."""
        self._arena = arena
        self._idle: dict[int, list[Tensor]] = {}
        self._idle_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """At least so many bytes; `give_back` them when the receiver has read them."""
        rounded = max(1 << (num_bytes - 1).bit_length(), _SMALLEST_BYTES)
        try:
            piece = self._idle[rounded].pop()
        except (KeyError, IndexError):
            return self._arena.empty(rounded)
        self._idle_bytes -= rounded
        return piece

    def give_back(self, piece: Tensor) -> None:
        """Keeps a piece for later messages, unless enough are kept."""
        if self._idle_bytes + piece.nbytes <= _MOST_IDLE_BYTES:
            self._idle_bytes += piece.nbytes
            self._idle.setdefault(piece.nbytes, []).append(piece)

    def close(self) -> None:
        """Frees everything."""
        self._idle.clear()

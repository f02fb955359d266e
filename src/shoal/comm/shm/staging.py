"""Where a rank copies tensors that are not in shared memory already: two halves in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.shm.routing import HALF_BYTES, WINDOW_BYTES
from shoal.comm.shm.segments import Arena
from shoal.torch_support.memory import of_dtype


class Staging:
    """Two halves of a segment, so that one can be filled while the other is still read.

    Views and locations are cached, because small operations are all overhead.

    Attributes:
        turn: How often a half was taken; its parity says which.
    """

    def __init__(self, arena: Arena) -> None:
        """The segment is made when it is first used."""
        self._arena = arena
        self._halves: list[Tensor] = []
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._locations: list[bytes] = []
        self._num_freed = -1
        self.turn = 0

    def put(self, source: Tensor) -> None:
        """Copies a source that fits into the half whose turn it is."""
        self.room(source).copy_(source)

    def room(self, source: Tensor) -> Tensor:
        """Flat memory for a source that fits, in the half whose turn it is."""
        key = (self.turn % 2, source.nbytes, source.dtype)
        view = self._views.get(key)
        if view is None:
            self._allocate()
            view = of_dtype(self._halves[key[0]][: source.nbytes], source.dtype)
            if len(self._views) < 1024:
                self._views[key] = view
        return view

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Memory for a window in the half whose turn it is, for this rank alone."""
        self._allocate()
        return of_dtype(self._halves[self.turn % 2][:WINDOW_BYTES], dtype)

    def location(self) -> bytes:
        """Where the half lies whose turn it is, encoded."""
        if self._num_freed != self._arena.num_freed:
            self._allocate()
            self._num_freed = self._arena.num_freed
            self._locations = [self._arena.encoded_location(half) for half in self._halves]
        return self._locations[self.turn % 2]

    def _allocate(self) -> None:
        if not self._halves:
            whole = self._arena.empty(2 * HALF_BYTES)
            self._halves = [whole[:HALF_BYTES], whole[HALF_BYTES:]]

    def close(self) -> None:
        """Frees the segment."""
        self._halves, self._views, self._locations = [], {}, []
        self._num_freed = -1

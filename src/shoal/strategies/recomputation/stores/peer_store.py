"""What blocks keep lies on another rank that has room, and comes back for backward."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor

from shoal.comm import Backend
from shoal.comm.peer_tensors.lending import Answer
from shoal.comm.peer_tensors.shelf import Shelf
from shoal.strategies.recomputation.stores.store import MovedMemory, MovingStore
from shoal.system.deadline import Deadline


class PeerStore(MovingStore):
    """Gives memory to the rank that is named at the moment; see [Note: balanced stages]."""

    takes_products = True

    def __init__(self, group: Backend) -> None:
        """``group``: the ranks that keep activations for each other; all of them call it."""
        super().__init__()
        self._group = group
        account = group.open_account()
        self._peers = group.lend(Shelf(group.device, account))
        weakref.finalize(self, self._peers.close).atexit = False
        weakref.finalize(self, account.close).atexit = False
        self.holder: int | None = None
        """Who keeps what is put in now; None for this rank itself."""
        self._numbers = itertools.count()
        self._ends: dict[str, weakref.finalize[..., MovedMemory]] = {}
        self._abandoned: list[tuple[int, str]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Everything, while somebody is named."""
        return self.holder is not None and super().takes(tensor)

    def move(self, memory: MovedMemory, data: Tensor, place: str) -> bool:
        """Gives the bytes away."""
        assert self.holder is not None
        key = f"{place} of rank {self._group.rank}, {next(self._numbers)}"
        request = {"kind": "give", "key": key, "device": data.device.type}
        # Threads would keep this very memory.
        given = data if self._peers.takes_time else data.clone()
        self._ask(self.holder, request, given)
        memory.place = (self.holder, key)
        # A graph may end without a backward.
        end = weakref.finalize(memory, self._abandoned.append, memory.place)
        end.atexit = False
        self._ends[key] = end
        return True

    def fetch(self, memory: MovedMemory) -> Tensor:
        """Takes the bytes back."""
        holder, key = memory.place
        whole = self._ask(holder, {"kind": "take", "key": key}).values
        assert whole is not None
        self._ends.pop(key).detach()
        return whole.to(memory.device)

    def settle(self) -> None:
        """Between batches: has others let go of what no backward has asked for."""
        while self._abandoned:
            holder, key = self._abandoned.pop()
            self._ends.pop(key, None)
            self._ask(holder, {"kind": "drop", "key": key})

    def _ask(self, holder: int, request: dict[str, Any], data: Tensor | None = None) -> Answer:
        return self._peers.call(holder, request, data, Deadline(self._group.timeout))

    def describe(self) -> str:
        """One line."""
        return "; what stages with more micro-batches under way keep lies on those with fewer"

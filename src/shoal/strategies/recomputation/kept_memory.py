"""The memory that blocks keep for their second call, for `world.stats`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from shoal.comm.accounting import Ledger
from shoal.torch_internals.tensors import storage_bytes, storage_id


class KeptMemory:
    """Counts tensors while something lives; memory that several share counts once.

    Example:
        >>> memory = KeptMemory(ledger)
        >>> memory.keep([x], graph)  # until the graph is gone
    """

    def __init__(self, ledger: Ledger) -> None:
        """``ledger``: the world's."""
        self._ledger = ledger
        self._users: dict[int, int] = {}
        # Python's collector may let go of something while this thread counts something else.
        self._lock = threading.RLock()

    def keep(self, tensors: Iterable[Tensor], holder: object) -> None:
        """Counts the tensors, parameters left out, until ``holder`` is gone."""
        kept = {
            storage_id(tensor): storage_bytes(tensor)
            for tensor in tensors
            if not isinstance(tensor, nn.Parameter)
        }
        for identity, num_bytes in kept.items():
            self._count(identity, num_bytes, 1)
        weakref.finalize(holder, self._release, kept).atexit = False

    def _release(self, kept: dict[int, int]) -> None:
        for identity, num_bytes in kept.items():
            self._count(identity, num_bytes, -1)

    def _count(self, identity: int, num_bytes: int, step: int) -> None:
        with self._lock:
            before = self._users.pop(identity, 0)
            if before + step:
                self._users[identity] = before + step
            if not before or not before + step:
                self._ledger.add("activations", step * num_bytes)

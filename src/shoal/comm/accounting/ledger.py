"""How much memory is used for what, now and at most."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(slots=True)
class MemoryUse:
    """Bytes of one rank for one purpose.

    Attributes:
        current: In use now.
        peak: The most that was in use at once.
    """

    current: int = 0
    peak: int = 0


class Ledger:
    """Memory of all models of a world on one rank: parameters, gradients, state, buffers.

    Example:
        >>> account = Ledger().account()
        >>> account.add("gradients", 4096)
        >>> account.add("gradients", -4096)
        >>> account.ledger.snapshot()["gradients"]
        MemoryUse(current=0, peak=4096)
    """

    def __init__(self) -> None:
        """Nothing is in use."""
        self._uses: dict[str, MemoryUse] = {}
        self._lock = threading.Lock()

    def account(self) -> Account:
        """A new account, for one model or optimizer."""
        return Account(self)

    def add(self, purpose: str, num_bytes: int) -> None:
        """Counts bytes that were allocated or, if negative, freed."""
        with self._lock:
            use = self._uses.setdefault(purpose, MemoryUse())
            use.current += num_bytes
            use.peak = max(use.peak, use.current)

    def snapshot(self) -> Mapping[str, MemoryUse]:
        """A copy of the figures as they are now."""
        with self._lock:
            return {purpose: replace(use) for purpose, use in self._uses.items()}

    def reset(self) -> None:
        """Peaks start again from the present use."""
        with self._lock:
            for use in self._uses.values():
                use.peak = use.current


class Account:
    """The memory of one model or optimizer; it can be closed as a whole."""

    def __init__(self, ledger: Ledger) -> None:
        """Nothing is in use."""
        self.ledger = ledger
        self._used: dict[str, int] = {}

    def add(self, purpose: str, num_bytes: int) -> None:
        """Counts bytes that were allocated or, if negative, freed."""
        self._used[purpose] = self._used.get(purpose, 0) + num_bytes
        self.ledger.add(purpose, num_bytes)

    def set(self, purpose: str, num_bytes: int) -> None:
        """Counts all that is in use for a purpose."""
        self.add(purpose, num_bytes - self._used.get(purpose, 0))

    def close(self) -> None:
        """Everything was freed."""
        for purpose in self._used:
            self.set(purpose, 0)

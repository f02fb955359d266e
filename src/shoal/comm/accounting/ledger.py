"""How much memory is held for what, now and at most."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(slots=True)
class MemoryUse:
    """Bytes of one rank for one purpose.

    Attributes:
        current: Held now.
        peak: The most that was held at once.
    """

    current: int = 0
    peak: int = 0


class Ledger:
    """What all models of a world hold on one rank: parameters, gradients, state, buffers.

    Example:
        >>> account = Ledger().account()
        >>> account.add("gradients", 4096)
        >>> account.add("gradients", -4096)
        >>> account.ledger.snapshot()["gradients"]
        MemoryUse(current=0, peak=4096)
    """

    def __init__(self) -> None:
        """Nothing is held."""
        self._uses: dict[str, MemoryUse] = {}
        self._lock = threading.Lock()

    def account(self) -> Account:
        """For one holder."""
        return Account(self)

    def add(self, purpose: str, num_bytes: int) -> None:
        """Counts what was taken, or with a negative number let go of."""
        with self._lock:
            use = self._uses.setdefault(purpose, MemoryUse())
            use.current += num_bytes
            use.peak = max(use.peak, use.current)

    def snapshot(self) -> Mapping[str, MemoryUse]:
        """A copy of the figures as they are now."""
        with self._lock:
            return {purpose: replace(use) for purpose, use in self._uses.items()}

    def reset(self) -> None:
        """Peaks start again from what is held now."""
        with self._lock:
            for use in self._uses.values():
                use.peak = use.current


class Account:
    """One holder's part of the ledger; it can be closed as a whole."""

    def __init__(self, ledger: Ledger) -> None:
        """Nothing is held."""
        self.ledger = ledger
        self._held: dict[str, int] = {}

    def add(self, purpose: str, num_bytes: int) -> None:
        """Counts what was taken, or with a negative number let go of."""
        self._held[purpose] = self._held.get(purpose, 0) + num_bytes
        self.ledger.add(purpose, num_bytes)

    def set(self, purpose: str, num_bytes: int) -> None:
        """Counts all that is held for a purpose."""
        self.add(purpose, num_bytes - self._held.get(purpose, 0))

    def close(self) -> None:
        """Everything was let go of."""
        for purpose in self._held:
            self.set(purpose, 0)

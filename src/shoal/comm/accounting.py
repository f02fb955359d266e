"""How often, how much and how long: counters of operations, and of the memory that is in use."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

_MOST_NOTES = 4096


@dataclass(slots=True)
class MemoryUse:
    """Bytes of one rank for one purpose.

    Attributes:
        current: In use now.
        peak: The most that was in use at once.
    """

    current: int = 0
    peak: int = 0


class Watermark:
    """The most memory that was in use at once for all purposes but one, since it was made."""

    def __init__(self, without: str, current: int) -> None:
        self._without, self._current, self.peak = without, current, current

    def rise(self, purpose: str, num_bytes: int) -> None:
        """Counts bytes that were allocated or, if negative, freed."""
        if purpose != self._without:
            self._current += num_bytes
            self.peak = max(self.peak, self._current)


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
        self._uses: dict[str, MemoryUse] = {}
        self._marks: weakref.WeakSet[Watermark] = weakref.WeakSet()
        # Python's collector may free something while this thread counts something else.
        self._lock = threading.RLock()

    def account(self) -> Account:
        """A new account, for one model or optimizer."""
        return Account(self)

    def add(self, purpose: str, num_bytes: int) -> None:
        """Counts bytes that were allocated or, if negative, freed."""
        with self._lock:
            use = self._uses.setdefault(purpose, MemoryUse())
            use.current += num_bytes
            use.peak = max(use.peak, use.current)
            for mark in self._marks:
                mark.rise(purpose, num_bytes)

    def watermark(self, without: str) -> Watermark:
        """Follows all memory from now on, but for one purpose."""
        with self._lock:
            counted = {purpose: use for purpose, use in self._uses.items() if purpose != without}
            mark = Watermark(without, sum(use.current for use in counted.values()))
            self._marks.add(mark)
        return mark

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


@dataclass(slots=True)
class Counter:
    """Figures of one kind of operation on one rank.

    Attributes:
        calls: How many were carried out.
        num_bytes: Payload of this rank's tensors: what it gave, or got where that is more.
        seconds: Time from call to completion, waiting for others included.
        waiting_seconds: The part spent until all ranks had arrived.
    """

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0


@dataclass(slots=True)
class CompressionCounter:
    """Bytes of what is compressed, gradients and gathered parameters, on one rank.

    Attributes:
        raw_bytes: What this rank would have sent without compression.
        sent_bytes: What it has sent.
    """

    raw_bytes: int = 0
    sent_bytes: int = 0


class StatisticsSnapshot(dict[str, Counter]):
    """Counters by operation, and the memory that is in use for each purpose.

    Attributes:
        memory: By purpose: "parameters", "gradients", "state" and "buffers" of wrapped models,
            "activations" that are kept by name, or by blocks that are computed again, and
            "residual" where gradients are compressed.
        compression: Of gradients and gathers, where a model was wrapped with it.
    """

    def __init__(
        self,
        counters: Mapping[str, Counter],
        memory: Mapping[str, MemoryUse],
        compression: CompressionCounter,
    ) -> None:
        super().__init__(counters)
        self.memory, self.compression = memory, compression


class Statistics:
    """Counters by operation, shared by a world and all its groups.

    Example:
        >>> statistics = Statistics()
        >>> statistics.count("all_reduce", 4096, 0.002, 0.001)
        >>> statistics.snapshot()["all_reduce"].calls
        1
    """

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._lock = threading.Lock()
        self.memory = Ledger()
        self._compression = CompressionCounter()
        # Operations only leave a note here, which is quick and safe in any thread.
        self._notes: deque[tuple[str, int, float, float]] = deque()

    def count(self, kind: str, num_bytes: int, seconds: float, waiting_seconds: float) -> None:
        """Adds one operation."""
        self._notes.append((kind, num_bytes, seconds, waiting_seconds))
        if len(self._notes) > _MOST_NOTES:
            with self._lock:
                self._add_up()

    def count_compression(self, raw_bytes: int, sent_bytes: int) -> None:
        """Adds one exchange of compressed gradients."""
        with self._lock:
            self._compression.raw_bytes += raw_bytes
            self._compression.sent_bytes += sent_bytes

    def _add_up(self) -> None:
        while self._notes:
            kind, num_bytes, seconds, waiting_seconds = self._notes.popleft()
            counter = self._counters.setdefault(kind, Counter())
            counter.calls += 1
            counter.num_bytes += num_bytes
            counter.seconds += seconds
            counter.waiting_seconds += waiting_seconds

    def snapshot(self) -> StatisticsSnapshot:
        """A copy of the figures as they are now."""
        with self._lock:
            self._add_up()
            counters = {kind: replace(counter) for kind, counter in self._counters.items()}
            compression = replace(self._compression)
        return StatisticsSnapshot(counters, self.memory.snapshot(), compression)

    def reset(self) -> None:
        """Everything back to zero."""
        with self._lock:
            self._notes.clear()
            self._counters.clear()
            self._compression = CompressionCounter()
        self.memory.reset()

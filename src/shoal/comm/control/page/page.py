"""The control plane between ranks of one host: a page of memory that all of them map.

[Note: memory order]
Ranks publish by writing data and then a counter, and read the counter before the data.
Nothing in Python fences memory, so this is right only where the processor keeps stores in
order and loads in order. x86 does; ARM does not, and there the page refuses to start.
No step relies on a store being seen before a later load (the one order x86 gives up).

[Note: the ring of headers]
A rank writes the header of operation n at index n % RING. Ranks that carry out one operation
after the other would need two: the index is written again for n + 2, which a rank begins only
after seeing all headers of n + 1, and a rank shows that header only when it is done with n. The
others are for operations that are shown ahead. A rank that shows one ahead makes sure that all
ranks are done with n - RING, so no rank reads a header while it is rewritten.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from shoal.comm.control.page.memory import LINE, MAX_GROUPS, MESSAGES, RING, WORD, Page
from shoal.comm.control.page.message import ANSWERED, FREE, OFFERED, PageMessage
from shoal.comm.control.page.process_watch import DeathWatch, spent_if_stopped
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Control, Failure
from shoal.errors import BackendUnavailableError, ShoalError

_JOINING, _RUNNING, _LEFT, _FAILED = range(4)
# Words of a rank's row in the roster; texts follow them.
_PID, _STATE, _FAILED_AT, _CULPRIT, _IS_ECHO = range(5)
_WHERE_AT, _WHERE_BYTES = 64, 960
_REASON_AT, _REASON_BYTES = 1024, 7168
_STOPPED_FOR_S = 1.0
_LOOK_FOR_DEATHS_EVERY_S = 0.01


class PageControl(Control):
    """The control plane of a world whose ranks are processes of one host."""

    def __init__(
        self, page: Page, rank: int, pids: Sequence[int], *, ranks_read_directly: bool = False
    ) -> None:
        """``pids`` are the processes of all ranks, by rank.

        ``ranks_read_directly`` if each can read the others' memory, see `process_memory.py`.
        """
        self.rank, self.size = rank, len(pids)
        self._page = page
        self.pids = pids
        self.ranks_read_directly = ranks_read_directly
        self._words = page.words
        self._row = page.layout.roster(rank)
        self._death = DeathWatch({pid: peer for peer, pid in enumerate(pids) if pid != os.getpid()})
        self._next_look_for_deaths = 0.0
        self._stopped: dict[int, tuple[float, bytes]] = {}
        self._is_closed = False
        self._noted = ""
        self._words[self._row // WORD + _PID] = os.getpid()
        self._set_state(_RUNNING)

    def _set_state(self, state: int) -> None:
        self._words[self._row // WORD + _STATE] = state

    def channel(self, group_id: int, ranks: Sequence[int]) -> PageChannel:
        """A row per member in the channel area; no communication needed."""
        if group_id >= MAX_GROUPS:
            raise ShoalError(
                f"this world has made {MAX_GROUPS} groups, which is all there is room for: "
                "make groups once and keep them instead of making them in a loop"
            )
        return PageChannel(self._page, group_id, ranks, self.rank)

    def publish(self, failure: Failure) -> None:
        """Writes the failure into this rank's row, then raises the world's alarm."""
        self._record(self.rank, failure)

    def _record(self, reporter: int, failure: Failure) -> None:
        if self._is_closed:
            return
        row = self._page.layout.roster(reporter)
        word = row // WORD
        if self._words[word + _STATE] == _FAILED:
            return
        reason = failure.reason.encode(errors="replace")[: _REASON_BYTES - 4]
        self._page.write(row + _REASON_AT, reason, _REASON_BYTES)
        self._words[word + _FAILED_AT] = failure.time_ns
        self._words[word + _CULPRIT] = failure.rank
        self._words[word + _IS_ECHO] = failure.is_echo
        self._words[word + _STATE] = _FAILED
        self._words[0] = 1

    def failure(self) -> Failure | None:
        """The first failure; deaths of ranks are recorded here."""
        now = time.monotonic()
        if now >= self._next_look_for_deaths:
            self._next_look_for_deaths = now + _LOOK_FOR_DEATHS_EVERY_S
            self._record_deaths()
        if not self._words[0]:
            return None
        failures = [self._read_failure(rank) for rank in range(self.size)]
        known = [failure for failure in failures if failure is not None]
        return min(known, key=lambda failure: (failure.is_echo, failure.time_ns), default=None)

    def _record_deaths(self) -> None:
        for rank in self._death.died():
            if self._state(rank) not in (_LEFT, _FAILED):
                reason = f"its process (pid {self.pids[rank]}) died without an exception"
                self._record(rank, Failure(rank, reason, time.monotonic_ns()))

    def _state(self, rank: int) -> int:
        return self._words[self._page.layout.roster(rank) // WORD + _STATE]

    def _read_failure(self, reporter: int) -> Failure | None:
        row = self._page.layout.roster(reporter)
        word = row // WORD
        if self._words[word + _STATE] != _FAILED:
            return None
        reason = self._page.read(row + _REASON_AT).decode(errors="replace")
        culprit, is_echo = self._words[word + _CULPRIT], bool(self._words[word + _IS_ECHO])
        return Failure(culprit, reason, self._words[word + _FAILED_AT], is_echo)

    def absence(self, rank: int) -> str | None:
        """A rank that left, or whose process has been stopped for more than a moment."""
        if self._state(rank) == _LEFT:
            return "it has left: it returned without taking part"
        spent = spent_if_stopped(self.pids[rank])
        if spent is None:
            self._stopped.pop(rank, None)
            return None
        now = time.monotonic()
        since, spent_then = self._stopped.get(rank, (now, spent))
        if spent != spent_then:  # it has run in the meantime: this is another stop
            since = now
        self._stopped[rank] = (since, spent)
        if now - since < _STOPPED_FOR_S:
            return None
        return f"its process (pid {self.pids[rank]}) is stopped (SIGSTOP or a debugger)"

    def note(self, where: str) -> None:
        """Writes into this rank's row."""
        if where != self._noted:  # most of what a rank does it does again and again
            self._noted = where
            self._page.write(self._row + _WHERE_AT, _clipped(where), _WHERE_BYTES)

    def whereabouts(self, rank: int) -> str:
        """Reads from the other's row; it may be writing, so this is a hint only."""
        data = self._page.read(self._page.layout.roster(rank) + _WHERE_AT)
        return data.decode(errors="replace") or "its own code, before any operation"

    def leave(self) -> None:
        """Marks this rank as gone, unless it failed."""
        if not self._is_closed and self._state(self.rank) != _FAILED:
            self._set_state(_LEFT)

    def close(self) -> None:
        """Closes the death watch and unmaps the page."""
        if not self._is_closed:
            self._is_closed = True
            self._death.close()
            self._page.close()


class PageChannel(Channel):
    """A group's headers and counters on the page."""

    def __init__(self, page: Page, group_id: int, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are world ranks in group order, ``rank`` is this one's."""
        self.ranks = ranks
        self._page, self._words, self._group_id, self._rank = page, page.words, group_id, rank
        layout = page.layout
        self._rows = [layout.channel(group_id, member) for member in ranks]
        self._numbers = [row // WORD for row in self._rows]
        self._steps = [(row + LINE) // WORD for row in self._rows]
        self._settled = [step + 1 for step in self._steps]
        self._mine = list(ranks).index(rank)
        self._step = 0
        self._written = [b""] * RING

    def exchange(self, number: int, header: bytes, patience: Patience) -> list[bytes]:
        """See [Note: the ring of headers]."""
        self.show(number, header)
        self._wait(self._numbers, number, patience)
        return self.shown(number)

    def show(self, number: int, header: bytes) -> None:
        """Shows a header without waiting for those of the others."""
        page, index = self._page, number % RING
        if header != self._written[index]:
            offset = self._rows[self._mine] + self._offset(number)
            page.write(offset, header, page.layout.header_bytes)
            self._written[index] = header
        self._words[self._numbers[self._mine]] = number

    def unshown(self, number: int) -> list[int]:
        """The world ranks that have not shown their header of an operation yet."""
        return self._missing(self._numbers, number)

    def shown(self, number: int) -> list[bytes]:
        """Everybody's header of an operation that everybody has shown."""
        offset = self._offset(number)
        return [self._page.read(row + offset) for row in self._rows]

    def _offset(self, number: int) -> int:
        return 2 * LINE + (number % RING) * self._page.layout.header_bytes

    def settle(self, number: int) -> None:
        """A counter beside the one of `sync`."""
        self._words[self._settled[self._mine]] = number

    def unsettled(self, number: int) -> list[int]:
        """Whose counter is not there yet."""
        return self._missing(self._settled, number)

    def sync(self, patience: Patience) -> None:
        """A barrier inside an operation, for transports that move data through memory.

        A rank that times out withdraws its arrival: it may overwrite its data while a late rank
        would read it.
        """
        mine, step = self._steps[self._mine], self._step + 1
        self._words[mine] = step
        try:
            self._wait(self._steps, step, patience)
        except BaseException:
            self._words[mine] = self._step
            raise
        self._step = step

    def _wait(self, counters: Sequence[int], target: int, patience: Patience) -> None:
        words = self._words
        for counter in counters:
            if words[counter] < target:
                while words[counter] < target:
                    patience.pause(partial(self._missing, counters, target))
                patience.made_progress()

    def _missing(self, counters: Sequence[int], target: int) -> list[int]:
        return [
            rank
            for rank, counter in zip(self.ranks, counters, strict=True)
            if self._words[counter] < target
        ]

    def offer(
        self, peer: int, key: tuple[int, int], header: bytes, patience: Patience
    ) -> PageMessage:
        """Takes a free entry among the open messages to the peer and waits for its header."""
        receiver = self.ranks[peer]
        message = self._free_message(receiver, patience)
        message.write_offer((self._group_id, *key), header)
        message.await_state(ANSWERED, patience, receiver)
        return message

    def post(self, peer: int, key: tuple[int, int], header: bytes) -> PageMessage | None:
        """Shows the peer a message without waiting; None if no entry is free for it."""
        message = self._claim(self.ranks[peer])
        if message is not None:
            message.write_offer((self._group_id, *key), header)
        return message

    def _free_message(self, receiver: int, patience: Patience) -> PageMessage:
        while (message := self._claim(receiver)) is None:
            patience.pause(lambda: [receiver])
        return message

    def _claim(self, receiver: int) -> PageMessage | None:
        for index in self._messages_in(FREE, self._rank, receiver):
            message = PageMessage(self._page, (self._rank, receiver), index, is_sender=True)
            if message.claim():
                return message
        return None

    def _messages_in(self, state: int, sender: int, receiver: int) -> Iterator[int]:
        first = self._page.layout.message_states(sender, receiver) // WORD
        states = self._words[first : first + MESSAGES].tolist()
        return (index for index, found in enumerate(states) if found == state)

    def accept(
        self, peer: int, key: tuple[int, int], header: bytes, patience: Patience
    ) -> PageMessage:
        """Finds the offer with the key, waiting for it, and answers with our header."""
        sender = self.ranks[peer]
        wanted = (self._group_id, *key)
        while (message := self._find_offer(sender, wanted)) is None:
            patience.pause(lambda: [sender])
        message.write_answer(header)
        return message

    def _find_offer(self, sender: int, key: tuple[int, int, int]) -> PageMessage | None:
        for index in self._messages_in(OFFERED, sender, self._rank):
            message = PageMessage(self._page, (sender, self._rank), index, is_sender=False)
            if message.is_offer_of(key):
                return message
        return None


@lru_cache(maxsize=1024)
def _clipped(where: str) -> bytes:
    return where.encode(errors="replace")[: _WHERE_BYTES - 4]


def is_supported() -> bool:
    """Whether a control page works here: see [Note: memory order]."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def check_platform() -> None:
    """Raises where a control page cannot work."""
    if not is_supported():
        raise BackendUnavailableError(
            f"shared memory between ranks needs Linux on x86-64; this is {platform.system()} on "
            f"{platform.machine()}. Use backend='gloo' (processes) or backend='memory' (threads)."
        )

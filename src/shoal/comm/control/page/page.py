"""The page of memory that the ranks of one host share: what is where, and a group's side of it.

[Note: the ring of headers]
A rank writes the header of operation n at index n % RING. Ranks that carry out one operation
after the other would need two: the index is written again for n + 2, which a rank begins only
after seeing all headers of n + 1, and a rank shows that header only when it is done with n. The
others are for operations that are shown ahead. A rank that shows one ahead makes sure that all
ranks are done with n - RING, so no rank reads a header while it is rewritten.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from shoal.comm.control.deadlock.record import MOST_RECORD_BYTES
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Message
from shoal.errors import ShoalError

LINE = 64
WORD = 8
MAX_GROUPS = 1024
RING = 8  # headers that a rank keeps in each group, see [Note: the ring of headers]
MESSAGES = 256
MESSAGE_HEADER = 1024
_ROSTER_ROW = 8192
WAIT_AT = WORD  # after the counter by which a reader knows that a record is whole
_WAIT_ROW = LINE + MOST_RECORD_BYTES
_LENGTH = struct.Struct("<I")
FREE, CLAIMED, OFFERED, ANSWERED, FINISHED = range(5)


class PageLayout:
    """Where things are on the page of a world of ``size`` ranks. Untouched parts cost nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.header_bytes = 1216 + 16 * size
        self.channel_row = 2 * LINE + RING * self.header_bytes
        self.channel_row += -self.channel_row % LINE
        self._message_row = LINE + 2 * MESSAGE_HEADER
        self._roster = LINE
        self._channels = self._roster + size * _ROSTER_ROW
        self._states = self._channels + MAX_GROUPS * size * self.channel_row
        self._messages = self._states + size * size * MESSAGES * WORD
        self._waits = self._messages + size * size * MESSAGES * self._message_row
        self.total_bytes = self._waits + size * _WAIT_ROW

    def roster(self, rank: int) -> int:
        """Offset of a rank's row of the roster."""
        return self._roster + rank * _ROSTER_ROW

    def wait(self, rank: int) -> int:
        """Offset of what a rank shows of its waits."""
        return self._waits + rank * _WAIT_ROW

    def channel(self, group_id: int, rank: int) -> int:
        """Offset of a rank's row in a group's channel."""
        return self._channels + (group_id * self.size + rank) * self.channel_row

    def message(self, source: int, destination: int, index: int) -> int:
        """Offset of one of the open messages from one rank to another."""
        box = source * self.size + destination
        return self._messages + (box * MESSAGES + index) * self._message_row

    def message_states(self, source: int, destination: int) -> int:
        """Offset of the states of all these messages, side by side: they are searched often."""
        return self._states + (source * self.size + destination) * MESSAGES * WORD


class Page:
    """The mapped memory: words that are counters and flags, and texts between them."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps the file; the descriptor stays the caller's."""
        self.layout = PageLayout(size)
        self._map = mmap.mmap(fd, self.layout.total_bytes)
        self.words = memoryview(self._map).cast("Q")
        self.lock = threading.Lock()

    @staticmethod
    def create(size: int) -> int:
        """A new anonymous file of the right size; it vanishes with its last user."""
        fd = os.memfd_create("shoal-control")
        os.ftruncate(fd, PageLayout(size).total_bytes)
        return fd

    def write(self, offset: int, data: bytes, capacity: int) -> None:
        """Writes a text that must fit."""
        if len(data) + 4 > capacity:
            raise ShoalError(
                f"an operation's header takes {len(data)} bytes where {capacity - 4} fit: "
                "a tensor with this many dimensions or split sizes cannot be described"
            )
        self._map[offset : offset + 4 + len(data)] = _LENGTH.pack(len(data)) + data

    def read(self, offset: int) -> bytes:
        """Reads a text."""
        start = offset + 4
        (length,) = _LENGTH.unpack(self._map[offset:start])
        return self._map[start : start + length]

    def close(self) -> None:
        """Unmaps the memory; twice is fine."""
        self.words.release()
        self._map.close()


class PageChannel(Channel):
    """A group's headers and counters on the page."""

    def __init__(self, page: Page, group_id: int, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are world ranks in group order, ``rank`` is this one's."""
        self.ranks, self.group_id = ranks, group_id
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
        self, peer: int, key: tuple[int, int], answer: Callable[[], bytes], patience: Patience
    ) -> PageMessage:
        """Finds the offer with the key, waiting for it, and answers with our header."""
        sender = self.ranks[peer]
        wanted = (self._group_id, *key)
        while (message := self._find_offer(sender, wanted)) is None:
            patience.pause(lambda: [sender])
        message.write_answer(answer())
        return message

    def _find_offer(self, sender: int, key: tuple[int, int, int]) -> PageMessage | None:
        for index in self._messages_in(OFFERED, sender, self._rank):
            message = PageMessage(self._page, (sender, self._rank), index, is_sender=False)
            if message.is_offer_of(key):
                return message
        return None


class PageMessage(Message):
    """One open message between two ranks: a state word, a key and two headers."""

    def __init__(self, page: Page, pair: tuple[int, int], index: int, *, is_sender: bool) -> None:
        """``pair`` is sender and receiver as world ranks."""
        self.ticket = index
        self._page, self._words = page, page.words
        self._offset = page.layout.message(*pair, index)
        self._key = self._offset // WORD
        self._state = page.layout.message_states(*pair) // WORD + index
        self._is_sender = is_sender
        self._receiver = pair[1]

    def claim(self) -> bool:
        """Takes the entry if it is free. Only threads of the sender compete for it."""
        with self._page.lock:
            is_free = self._words[self._state] == FREE
            if is_free:
                self._words[self._state] = CLAIMED
        return is_free

    def write_offer(self, key: tuple[int, int, int], header: bytes) -> None:
        """Shows the receiver key and header."""
        for word, part in enumerate(key):
            self._words[self._key + word] = part
        self._page.write(self._offset + LINE, header, MESSAGE_HEADER)
        self._words[self._state] = OFFERED

    def is_offer_of(self, key: tuple[int, int, int]) -> bool:
        """Whether this is the message the receiver looks for."""
        words = self._words
        return words[self._state] == OFFERED and tuple(words[self._key : self._key + 3]) == key

    def write_answer(self, header: bytes) -> None:
        """Shows the sender our header; from here on both know both."""
        self.theirs = self._page.read(self._offset + LINE)
        self._page.write(self._offset + LINE + MESSAGE_HEADER, header, MESSAGE_HEADER)
        self._words[self._state] = ANSWERED

    def has_reached(self, state: int) -> bool:
        """Whether the other side has moved the message on that far."""
        return bool(self._words[self._state] >= state)

    def await_state(self, state: int, patience: Patience, peer: int) -> None:
        """Waits until the other side has moved the message on."""
        while self._words[self._state] < state:
            patience.pause(lambda: [peer] if self._words[self._state] < state else [])
        self.theirs = self._page.read(self._offset + LINE + MESSAGE_HEADER)

    def finish(self, patience: Patience) -> None:
        """The receiver marks it finished; the sender then frees the entry."""
        if self._is_sender:
            self.await_state(FINISHED, patience, self._receiver)
            self._words[self._state] = FREE
        else:
            self._words[self._state] = FINISHED

    def abandon(self) -> None:
        """The sender frees the entry; the receiver has read what it needs."""
        if self._is_sender:
            self._words[self._state] = FREE

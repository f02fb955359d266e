"""Messages between two ranks of one host, on the page."""

from __future__ import annotations

from shoal.comm.control.page.memory import LINE, MESSAGE_HEADER, WORD, Page
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Message

FREE, CLAIMED, OFFERED, ANSWERED, FINISHED = range(5)


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

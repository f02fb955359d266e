"""`OneWay`: the messages from one rank to another, over a communicator of these two.

[Note: the order of messages]
NCCL pairs sends with receives by their order alone, and several messages may be under way at once,
called in another order on either side. So the two ranks agree on an order: that in which their
calls met. The receiver counts when it finds a message that was offered, and its header tells the
sender the number. Each rank launches them by their numbers. One that moves nothing, or that fails,
gives its number up on both sides.

What a message needs of the GPU was launched before the call, so it can only be behind messages
that met earlier. So none of them waits in a circle, though they share a queue of the GPU. There is
one exception, which the watchdog ends: a gather that was launched before the other ranks called it,
between two messages that the other side receives in the background and in the other order.

The communicator is made when the first message is called, before it is offered: messages that
wait for their turn hold the places for offers, which making it needs.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

from shoal.comm.control.patience import Patience
from shoal.comm.torch_groups.groups import ProcessGroup

_NUMBER = struct.Struct("<q")
_POLL_S = 0.05


class OneWay:
    """One rank's side of the messages from one rank to another."""

    def __init__(self, peer: int, connect: Callable[[Patience], ProcessGroup | None]) -> None:
        """``peer`` is the other's world rank; ``connect`` makes the communicator."""
        self._peer, self._connect = peer, connect
        self._is_connecting = threading.Lock()
        self._changed = threading.Condition()
        self._num_met = self._num_over = 0
        self._ended: set[int] = set()
        self.group: ProcessGroup | None = None

    def connect(self, patience: Patience) -> None:
        """Makes the communicator, if there is none; the other rank does the same."""
        with self._is_connecting:
            if self.group is None:
                self.group = self._connect(patience)

    def meet(self) -> bytes:
        """The number of a message that has met its receiver, as that tells the sender."""
        with self._changed:
            number, self._num_met = self._num_met, self._num_met + 1
        return _NUMBER.pack(number)

    def await_turn(self, number: bytes, patience: Patience) -> ProcessGroup | None:
        """Until all messages before this one are launched; returns the communicator."""
        own = _NUMBER.unpack(number)[0]
        while self._num_over < own:
            with self._changed:
                is_next = self._changed.wait_for(lambda: self._num_over >= own, _POLL_S)
            if not is_next:
                patience.pause(lambda: [self._peer])
        return self.group

    def end(self, number: bytes) -> None:
        """The message is launched, or will never be."""
        with self._changed:
            self._ended.update(_NUMBER.unpack(number))
            while self._num_over in self._ended:
                self._ended.remove(self._num_over)
                self._num_over += 1
            self._changed.notify_all()

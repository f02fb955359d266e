"""The port at which Gloo listens for the ranks of a group: open only while they connect.

[Note: Gloo's port]
Gloo listens as long as a group lives, keeps a descriptor of everybody who has ever called, and ends
the process when it can have no more. It has no call to stop that, and does not survive it if we
close its socket. So the kernel is asked to drop what arrives for the listener: at first, and
again once all ranks are connected. In between the members of the group are all there and do nothing
but connect, which takes milliseconds. Where the kernel cannot be asked the port stays open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shoal.system import listeners

# More callers than these beside the group's own ranks are strangers, who use up descriptors.
MOST_STRANGERS = 256

_making = threading.Lock()


class Port:
    """The listener of one group. It belongs to Gloo."""

    def __init__(self) -> None:
        self._found: tuple[int, int] | None = None

    def make(self, device: Callable[[], Any]) -> Any:
        """What ``device`` makes, whose listener is this port; nobody is heard yet."""
        with _making:
            before = listeners.tcp_listeners()
            made = device()
            new = listeners.tcp_listeners() - before
        if len(new) == 1:  # else a thread of the script's has made one as well: which is it?
            (self._found,) = new
            self.close()
        return made

    def open(self) -> None:
        """From now on the ranks of the group can call."""
        if self._found is not None and listeners.is_still(*self._found):
            listeners.hear_all(self._found[0])

    def close(self) -> None:
        """From now on nobody is heard who is not connected."""
        if self._found is not None and listeners.is_still(*self._found):
            listeners.hear_nobody(self._found[0])

    def is_crowded(self, size: int) -> bool:
        """Whether more have called than a group of this size and a few strangers."""
        if self._found is None or not listeners.is_still(*self._found):
            return False
        return listeners.num_callers(self._found[0]) > size + MOST_STRANGERS

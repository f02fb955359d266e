"""Signals that reach the launcher go on to its ranks; two of them also mean the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from shoal.launch.script.rank import Rank

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """What came in so far.

    Example:
        >>> signals = Signals(ranks)
        >>> with signals.forwarded():
        ...     await signals.stop.wait()
    """

    def __init__(self, ranks: list[Rank]) -> None:
        """Forwards to `ranks`, a list that may still grow."""
        self._ranks = ranks
        self.stopped_by: signal.Signals | None = None
        self.stopped_at = 0.0
        self.stop = asyncio.Event()
        """Set by the first SIGINT or SIGTERM."""
        self.hurry = asyncio.Event()
        """Set by a second SIGINT: the grace period is skipped."""

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[None]:
        """Handles signals inside the block, and puts the handlers back that were there.

        A signal that the launcher was started to ignore (nohup) stays ignored. Outside the main
        thread Python delivers no signals, so there is nothing to forward.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {signum: signal.getsignal(signum) for signum in FORWARDED}
        handled = [signum for signum in FORWARDED if before[signum] not in (signal.SIG_IGN, None)]
        for signum in handled:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in handled:
                loop.remove_signal_handler(signum)
                signal.signal(signum, before[signum])

    def _on_signal(self, signum: signal.Signals) -> None:
        for rank in self._ranks:
            rank.send(signum)
        if signum == signal.SIGINT and self.stop.is_set():
            self.hurry.set()
        if signum in _STOPPING and self.stopped_by is None:
            self.stopped_by, self.stopped_at = signum, time.time()
            self.stop.set()

"""How ranks that do not know each other yet exchange a few bytes."""

from __future__ import annotations

import json
import socket
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING

from shoal.errors import PeerError
from shoal.system.deadline import Deadline, joining_text, pauses, wait_until

if TYPE_CHECKING:
    from torch.distributed import Store

_FAILURE_KEY = "shoal/failed-before-joining"
_JOINED = "shoal/joined"
_LINGER_S = 5.0
_POLL_S, _LONGEST_POLL_S = 0.005, 0.1


class Bootstrap(ABC):
    """A slow way to exchange a few bytes, from which the control plane is made."""

    rank: int
    size: int
    timeout: float
    is_private: bool = False
    """Whether only this run's own ranks can read it. A store on the network is open to all."""

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank; raises at the deadline, naming who is missing."""

    def joined(self) -> None:
        """This rank is part of the world now."""

    def close(self) -> None:
        """This rank leaves. What others still need to join must outlast that."""


class StoreBootstrap(Bootstrap):
    """Over a torch store that all ranks reach."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        *,
        holds_store: bool = False,
        news: Store | None = None,
    ) -> None:
        """``store`` must be fresh for this world, and may live in this process.

        ``news`` is where `report_failure` leaves word of ranks that will never join.
        """
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._news = store if news is None else news
        self._holds_store = holds_store
        self._round = 0

    def all_gather(self, data: bytes) -> list[bytes]:
        """Each rank sets its key; then the keys are read as they appear."""
        self._round += 1
        self.store.set(self._key(self.rank), data)  # type: ignore[arg-type]  # bytes are fine
        self._await_all()
        return [self.store.get(self._key(rank)) for rank in range(self.size)]

    def joined(self) -> None:
        """Counts this rank, for the rank that holds the store."""
        self.store.add(_JOINED, 1)

    def close(self) -> None:
        """Keeps a store that lives in this process until all ranks have joined."""
        if self._holds_store:
            wait_until(lambda: self.store.add(_JOINED, 0) >= self.size, _LINGER_S, _POLL_S)

    def _key(self, rank: int) -> str:
        return f"shoal/{self._round}/{rank}"

    def _await_all(self) -> None:
        deadline = Deadline(self.timeout)
        question = "Are they all started, and do they reach the same store?"
        for pause in pauses(_POLL_S, _LONGEST_POLL_S):
            if not self._missing():
                return
            failure = self._failure()
            # The rank that ended may have joined before that: what counts is who is missing.
            if failure is not None and self._missing():
                raise failure
            deadline.enforce(joining_text, self.rank, self.size, self._missing, question)
            time.sleep(pause)

    def _missing(self) -> list[int]:
        keys = [self._key(rank) for rank in range(self.size)]
        if self.store.check(keys):
            return []
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _failure(self) -> PeerError | None:
        if not self._news.check([_FAILURE_KEY]):
            return None
        report = json.loads(self._news.get(_FAILURE_KEY))
        return PeerError(report["rank"], report["reason"], "shoal.init, waiting for all to join")


def report_failure(news: Store, rank: int, reason: str) -> None:
    """Tells ranks that are joining, or will, of one that does not; the first report counts."""
    report = json.dumps({"rank": rank, "reason": reason})
    news.compare_set(_FAILURE_KEY, "", report)


def host_store(address: str, port: int = 0, timeout: float = 300.0) -> tuple[Store, int]:
    """A store in this process that is reached at one address only, and its port."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    return store, port


def store_for_one_host() -> tuple[Store, int]:
    """A store on this host's loopback that no other host reaches, and its port."""
    return host_store("127.0.0.1", timeout=60.0)

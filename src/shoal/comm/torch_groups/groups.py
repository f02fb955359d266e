"""Process groups of torch's: how they are made, or found where a script has made one already."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shoal.comm.bootstrap.store import Bootstrap, StoreBootstrap, host_store
from shoal.comm.control.addresses import LOOPBACK, own_address, settled_address
from shoal.comm.control.page.control import PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control
from shoal.comm.torch_groups.watchdog import Flight, Watchdog
from shoal.comm.work import ThreadedWork
from shoal.errors import DeadlineError, ShoalError, TransportError
from shoal.system.rank_names import name_ranks
from shoal.torch_internals.process_groups import default_group

if TYPE_CHECKING:
    from torch.distributed import Store

ProcessGroup = Any
"""A ``ProcessGroupGloo`` or ``ProcessGroupNCCL``; torch has types for few of their methods."""
Maker = Callable[["Store", int, int, timedelta], ProcessGroup]
"""Makes a process group from a store of its own, a rank, a size and a timeout."""

# Longer than our own deadline, which has more to say.
_SPARE_S = 30.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Links:
    """What the groups of one world share.

    Attributes:
        control: Tells who fails while a process group is made.
        watchdog: Looks after transfers.
        store: Where the members of a new process group find each other.
        make: Makes one.
        timeout: Seconds that making one may take.
        found: The script's own process group of all ranks, if there is one.
    """

    control: Control
    watchdog: Watchdog
    store: Store
    make: Maker
    timeout: float
    found: ProcessGroup | None = None

    def connect_world(self) -> ProcessGroup | None:
        """The process group of all ranks: the script's own, or one that is made."""
        if self.found is not None:
            return self.found
        return self.connect("world", range(self.control.size))

    def connect(self, name: str, ranks: Sequence[int]) -> ProcessGroup | None:
        """A process group of some world ranks; all of them call this, with the same new name.

        Making one blocks until all members are here, so a thread does it while this one looks
        whether they ever will be.
        """
        if len(ranks) == 1:
            return None
        # A store serves one thread at a time, and a thread that waits would keep out all others.
        own: Store = self.store.clone()  # type: ignore[attr-defined]  # torch's types lack it
        store = dist.PrefixStore(f"shoal-group/{name}", own)
        rank = list(ranks).index(self.control.rank)
        timeout = timedelta(seconds=self.timeout + _SPARE_S)
        work = ThreadedWork(partial(self.make, store, rank, len(ranks), timeout), name)
        work.start_thread("shoal-connect")
        return self._await(work, f"making the process group of {name_ranks(ranks)}", ranks)

    def _await(self, work: ThreadedWork[Any], what: str, ranks: Sequence[int]) -> ProcessGroup:
        others = [rank for rank in ranks if rank != self.control.rank]
        patience = Patience(self.control, lambda: what, ranks, self.timeout)
        flight = Flight(patience, others, abort=lambda verdict: None)
        while True:
            verdict: ShoalError | None
            try:
                return work.wait(_LOOK_EVERY_S)
            except DeadlineError:
                verdict = flight.examine()
            except RuntimeError as error:
                verdict = flight.await_verdict() or TransportError(f"{what} failed: {error}")
            if verdict is not None:
                raise verdict


def find_group(kind: type[ProcessGroup], device: str, bootstrap: Bootstrap) -> ProcessGroup | None:
    """The process group that the script made of the same ranks, if it has one of that kind."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = default_group(kind, device)
    position = (bootstrap.rank, bootstrap.size)
    return group if group and (group.rank(), group.size()) == position else None


def link(
    bootstrap: Bootstrap,
    control: Control,
    timeout: float,
    found: ProcessGroup | None,
    maker: Callable[[str], Maker],
) -> Links:
    """What the groups of a new world need; every rank of it calls this.

    A process group that the script made (``found``) counts if every rank has one. ``maker`` leads
    from this host's address to what makes process groups.
    """
    is_one_host = isinstance(control, PageControl)
    address = LOOPBACK if is_one_host else own_address(bootstrap)
    store, port = _open_store(bootstrap, address)
    mine = {"address": address, "port": port, "has_group": found is not None}
    everybody = [json.loads(data) for data in bootstrap.all_gather(json.dumps(mine).encode())]
    if store is None:
        store = dist.TCPStore(everybody[0]["address"], everybody[0]["port"], is_master=False)
    if not all(each["has_group"] for each in everybody):
        found = None
    address = settled_address(address, [each["address"] for each in everybody])
    return Links(control, Watchdog(control), store, maker(address), timeout, found)


def _open_store(bootstrap: Bootstrap, address: str) -> tuple[Store | None, int]:
    """The store where the ranks met, or one of our own on rank 0 where they met without."""
    if isinstance(bootstrap, StoreBootstrap):
        return bootstrap.store, 0
    if bootstrap.rank != 0:
        return None, 0
    return host_store(address)

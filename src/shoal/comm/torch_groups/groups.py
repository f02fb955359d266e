"""Process groups of torch's: how they are made, and how their connections are proven.

[Note: strangers at a transport's port]
Gloo's connections prove nothing: whoever reaches a rank's port first can pass for another rank. So
the addresses of a new group do not lie in a store that others can read or write: the ranks show
them to each other over the control plane, and each feeds them to a store inside its own process.
Then every two ranks of the group prove to each other, over the very connection between them, that
they know the world's secret, for this group and these two ranks. Only then is the group used. NCCL
takes its id the same way, and refuses by itself whoever does not know it.

A process group that the script made itself cannot be proven, because what it carries is the
script's, so it is never used.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.addresses import LOOPBACK, own_address, settled_address
from shoal.comm.control.page.control import PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Control, Failure, Message
from shoal.comm.torch_groups.launch_order import LaunchOrder
from shoal.comm.torch_groups.port import MOST_STRANGERS, Port
from shoal.comm.torch_groups.watchdog import Flight, Watchdog
from shoal.comm.work import ThreadedWork
from shoal.errors import DeadlineError, ShoalError, TransportError
from shoal.system.rank_names import name_ranks
from shoal.system.site import describe

ProcessGroup = Any
"""A ``ProcessGroupGloo`` or ``ProcessGroupNCCL``; torch has types for few of their methods."""
Maker = Callable[[dist.Store, int, int, timedelta, Port], ProcessGroup]
"""Makes a process group from a store of its own, a rank, a size, a timeout, and for its port."""
Exchange = Callable[[bytes, Patience], list[bytes]]
"""Shows a few bytes to all members of a new group; everybody's, in group order."""

# Longer than our own deadline, which has more to say.
_SPARE_S = 30.0
# Often enough that a crowd at a port is seen before it has taken all descriptors.
_LOOK_EVERY_S = 0.01
_POLL_S = 0.001
# All members are there when connections are proven, so this is a matter of moments.
_PROOF_S = 30.0
_NONCE_BYTES = _PROOF_BYTES = 32
# What fits into a header of the control page beside a few marks.
_PIECE_BYTES = 640
_LAST, _MORE = b"\0", b"\1"
_FAILED = "failed"


@dataclass(frozen=True)
class Links:
    """What the groups of one world share.

    Attributes:
        control: Tells who fails while a process group is made.
        watchdog: Looks after transfers.
        make: Makes a process group.
        leaves: Which ranks of a group leave something in its store for the others.
        timeout: Seconds that making one may take.
        proves: Whether the connections of a process group must be proven.
        launches: The order in which their operations are launched.
    """

    control: Control
    watchdog: Watchdog
    make: Maker
    leaves: Callable[[int], bool]
    timeout: float
    proves: bool
    launches: LaunchOrder = field(default_factory=LaunchOrder)

    def connect(
        self,
        name: str,
        ranks: Sequence[int],
        exchange: Exchange,
        patience: Patience | None = None,
    ) -> ProcessGroup | None:
        """A process group of some world ranks; all of them call this, with the same new name.

        ``patience`` is that of an operation which needs the group, if there is one. Making one
        blocks until all members are here, so a thread does it while this one shows the others what
        it has put into its store, and looks whether they ever will be here.
        """
        if len(ranks) == 1:
            return None
        store, port = dist.HashStore(), Port()
        work = ThreadedWork(partial(self._make_proven, store, name, list(ranks), port), name)
        work.start_thread("shoal-connect")
        what = f"making the process group of {name_ranks(ranks)}"
        others = [rank for rank in ranks if rank != self.control.rank]
        if patience is None:
            patience = Patience(self.control, lambda: what, ranks, self.timeout, eager=False)
        flight = Flight(patience, others, abort=lambda verdict: None)
        leaves = self.leaves(list(ranks).index(self.control.rank))
        if leaves:
            _await_first_key(store, work, flight)
        theirs = _show(store, work, lambda data: exchange(data, patience))
        if self.proves and theirs:  # a call before the called has opened would take a second
            port.open()
            exchange(b"", patience)
        for key, value in theirs.items():
            store.set(key, value)  # type: ignore[arg-type]  # bytes are fine
        return self._await(work, what, flight, lambda: self._find_crowd(port, ranks))

    def _make_proven(
        self, store: dist.Store, name: str, ranks: list[int], port: Port
    ) -> ProcessGroup:
        rank = ranks.index(self.control.rank)
        timeout = timedelta(seconds=self.timeout + _SPARE_S)
        group = self.make(store, rank, len(ranks), timeout, port)
        if self.proves:
            self._prove(group, name, ranks)
            port.close()
            crowd = self._find_crowd(port, ranks)
            if crowd is not None:
                raise crowd
        return group

    def _prove(self, group: ProcessGroup, name: str, ranks: list[int]) -> None:
        """See [Note: strangers at a transport's port]."""
        secret = self.control.secret or b""  # without a token: whoever can answer is let in
        me, size = ranks.index(self.control.rank), len(ranks)
        try:
            mine = [secrets.token_bytes(_NONCE_BYTES) for _ in ranks]
            theirs = _swap(group, mine)
            proofs = [
                _proof(secret, name, (ranks[me], mine[peer]), (ranks[peer], theirs[peer]))
                for peer in range(size)
            ]
            found = _swap(group, proofs)
        except RuntimeError as error:
            raise self._stranger(
                f"a connection of the group of {name_ranks(ranks)} does not answer: {error}"
            ) from error
        for peer in range(size):
            expected = _proof(secret, name, (ranks[peer], theirs[peer]), (ranks[me], mine[peer]))
            if peer != me and not hmac.compare_digest(found[peer], expected):
                raise self._stranger(
                    f"what should be rank {ranks[peer]} does not know the run's secret"
                )

    def _stranger(self, what: str) -> TransportError:
        error = TransportError(
            f"a stranger is connected to rank {self.control.rank} in place of another: {what}. "
            "Nothing was sent to it or read from it. Look for processes of other users that call "
            "this host's ports, and start the run again."
        )
        return self._publish(error)

    def _publish(self, error: TransportError) -> TransportError:
        failure = Failure(self.control.rank, describe(error), time.monotonic_ns())
        self.control.publish(failure)
        return error

    def _find_crowd(self, port: Port, ranks: Sequence[int]) -> ShoalError | None:
        """Before Gloo has no descriptor left, and ends the process without a word to the user."""
        if not port.is_crowded(len(ranks)):
            return None
        port.close()
        error = TransportError(
            f"more than {MOST_STRANGERS} strangers have called rank {self.control.rank} while its "
            f"connections with {name_ranks(ranks)} were made. Look for processes that call "
            "this host's ports, and start the run again."
        )
        return self._publish(error)

    def _await(
        self,
        work: ThreadedWork[Any],
        what: str,
        flight: Flight,
        look: Callable[[], ShoalError | None],
    ) -> ProcessGroup:
        while True:
            verdict: ShoalError | None
            try:
                return work.wait(_LOOK_EVERY_S)
            except DeadlineError:
                verdict = flight.examine() or look()
            except RuntimeError as error:
                verdict = flight.await_verdict() or TransportError(f"{what} failed: {error}")
            if verdict is not None:
                raise verdict


def _await_first_key(store: dist.HashStore, work: ThreadedWork[Any], flight: Flight) -> None:
    """Until a library has put into our store what the others need, or has failed."""
    while not store.num_keys() and not work.is_done():
        verdict = flight.examine()
        if verdict is not None:
            raise verdict
        time.sleep(_POLL_S)


def _show(
    store: dist.HashStore, work: ThreadedWork[Any], exchange: Callable[[bytes], list[bytes]]
) -> dict[str, bytes]:
    """Shows the other members what a library has put into our store; returns what theirs have.

    Nothing if the library has failed here.
    """
    mine = {key: store.get(key).hex() for key in store.list_keys()}
    if work.is_done():  # before it has met anybody: it failed
        mine = {_FAILED: ""}
    everybody = [json.loads(data) for data in exchange(json.dumps(mine).encode())]
    if _FAILED in mine:
        return {}
    if any(_FAILED in each for each in everybody):
        raise TransportError("another rank could not make its side of the process group")
    found = [(key, value) for each in everybody for key, value in each.items()]
    return {key: bytes.fromhex(value) for key, value in found if key not in mine}


class GroupExchange:
    """Shows bytes of any length to all members of a group, over its channel, in pieces.

    Attributes:
        number: Of the channel's exchanges that were used.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.number = 0

    def __call__(self, data: bytes, patience: Patience) -> list[bytes]:
        """Everybody's, in group order."""
        whole = [bytearray() for _ in self._channel.ranks]
        is_open = True
        while is_open:
            piece, data = data[:_PIECE_BYTES], data[_PIECE_BYTES:]
            self.number += 1
            shown = self._channel.exchange(
                self.number, (_MORE if data else _LAST) + piece, patience
            )
            for joined, each in zip(whole, shown, strict=True):
                joined += each[1:]
            is_open = any(each[:1] == _MORE for each in shown)
        return [bytes(each) for each in whole]


class NumberedAnew(Channel):
    """A channel some of whose exchanges were used: the next is number 1 to operations again."""

    def __init__(self, channel: Channel, num_used: int) -> None:
        self._channel, self._num_used = channel, num_used
        self.ranks, self.group_id = channel.ranks, channel.group_id

    def exchange(self, number: int, header: bytes, patience: Patience) -> list[bytes]:
        """Under the channel's own number."""
        return self._channel.exchange(number + self._num_used, header, patience)

    def offer(self, peer: int, key: tuple[int, int], header: bytes, patience: Patience) -> Message:
        """As it is."""
        return self._channel.offer(peer, key, header, patience)

    def accept(
        self, peer: int, key: tuple[int, int], answer: Callable[[], bytes], patience: Patience
    ) -> Message:
        """As it is."""
        return self._channel.accept(peer, key, answer, patience)

    def settle(self, number: int) -> None:
        """As it is."""
        self._channel.settle(number)

    def unsettled(self, number: int) -> list[int]:
        """As it is."""
        return self._channel.unsettled(number)


def exchange_between_two(
    channel: Channel, peer: int, key: tuple[int, int], is_sender: bool
) -> Exchange:
    """The same between two members: the sender's bytes, then the receiver's."""

    def exchange(data: bytes, patience: Patience) -> list[bytes]:
        if is_sender:
            message = channel.offer(peer, key, data, patience)
        else:
            message = channel.accept(peer, key, lambda: data, patience)
        message.finish(patience)
        both = [data, message.theirs]
        return both if is_sender else both[::-1]

    return exchange


def _swap(group: ProcessGroup, parts: Sequence[bytes]) -> list[bytes]:
    """Sends each rank its part over the connection with it; returns what came, by rank."""
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=_PROOF_S)
    sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    received = torch.empty_like(sent)
    sizes = [len(part) for part in parts]
    group.alltoall_base(received, sent, sizes, sizes, options).wait()
    return [part.numpy().tobytes() for part in received.split(sizes)]


def _proof(secret: bytes, name: str, maker: tuple[int, bytes], reader: tuple[int, bytes]) -> bytes:
    """That ``maker`` knows the secret; each is a world rank and its random number."""
    about = f"connection\0{name}\0{maker[0]}\0{reader[0]}\0".encode()
    return hmac.digest(secret, about + maker[1] + reader[1], "sha256")


def link(
    bootstrap: Bootstrap,
    control: Control,
    timeout: float,
    maker: Callable[[str], Maker],
    leaves: Callable[[int], bool],
    *,
    proves: bool,
) -> Links:
    """What the groups of a new world need; every rank of it calls this.

    ``maker`` leads from this host's address to what makes process groups; ``leaves`` tells which
    ranks of a group leave something in its store for the others.
    """
    address = LOOPBACK if isinstance(control, PageControl) else own_address(bootstrap)
    everybody = [data.decode() for data in bootstrap.all_gather(address.encode())]
    address = settled_address(address, everybody)
    return Links(control, Watchdog(control), maker(address), leaves, timeout, proves)

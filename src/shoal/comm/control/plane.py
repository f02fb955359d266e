"""The interface of the control plane.

[Note: data and control]
The payload of an operation travels over a transport (shared memory, Gloo, NCCL, MPI).
Before it does, each rank shows the others a header over the control plane, which is ours:
a page of memory between the ranks of one host, sockets between hosts. So a transport never
sees a mismatch, and whatever happens to a rank, the others hear of it on a plane that does
not depend on the transport's own idea of failure.

`Control` is the world's side: who is alive, who failed and why, where everybody is.
`Channel` is a group's side: the exchange of headers, and of messages between two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shoal.errors import MembershipChanged, PeerError

if TYPE_CHECKING:
    from shoal.comm.control.deadlock.watch import DeadlockWatch
    from shoal.comm.control.patience import Patience


HIDDEN = "\0"
"""In a note: what follows is for ranks to read, not for people."""


def absence_text(how: str) -> str:
    """Why it is pointless to wait for a rank that left; ``how`` is its own word, if it had one."""
    return f"it has left by {how}" if how else "it has left: it returned without taking part"


class Failure(NamedTuple):
    """Why a world cannot go on.

    Attributes:
        rank: The world rank at fault.
        reason: What happened to it, in words.
        time_ns: When, to tell the first failure from those that followed.
        is_echo: Whether the reporting rank only passes on another's failure.
    """

    rank: int
    reason: str
    time_ns: int
    is_echo: bool = False


class Control(ABC):
    """Life and death of the ranks of one world, as one of them sees it."""

    rank: int
    size: int
    is_one_host: ClassVar[bool] = False
    """Whether all ranks are known to be processes of one host."""
    secret: bytes | None = None
    """What only this world's ranks know, so that their pickles may be read; None: anybody's."""
    deadlocks: DeadlockWatch | None = None
    """Finds ranks that wait for each other, once there is a world."""
    is_elastic: bool = False
    """Whether the others may go on without a rank that is gone."""

    def lost(self, rank: int, reason: str, context: str = "") -> PeerError:
        """What to raise where a rank is gone."""
        kind = MembershipChanged if self.is_elastic else PeerError
        return kind(rank, reason, context)

    @abstractmethod
    def channel(self, group_id: int, ranks: Sequence[int]) -> Channel:
        """The channel of a group; its members know it by ``group_id``, new to each of them."""

    @abstractmethod
    def publish(self, failure: Failure) -> None:
        """Tells every rank, waking those that wait."""

    @abstractmethod
    def failure(self) -> Failure | None:
        """The first failure of any rank, a dead process included."""

    @abstractmethod
    def absence(self, rank: int) -> str | None:
        """Why waiting for a rank is pointless though it did not fail: it left, it is stopped."""

    @abstractmethod
    def note(self, where: str) -> None:
        """Leaves a note of what this rank is doing, for the others' error messages."""

    @abstractmethod
    def whereabouts(self, rank: int) -> str:
        """The last note of a rank."""

    @abstractmethod
    def show_wait(self, record: bytes) -> None:
        """Shows the others what this rank waits for; nothing at all if it does not wait."""

    @abstractmethod
    def shown_waits(self) -> dict[int, bytes]:
        """What ranks that wait have shown, by rank."""

    @abstractmethod
    def leave(self, how: str = "") -> None:
        """Says goodbye: ranks that wait for this one from now on are told so at once, and how."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything the plane holds. Twice is fine."""


class Channel(ABC):
    """What the members of one group show each other."""

    ranks: Sequence[int]
    """The members' world ranks, in group order."""
    group_id: int
    """By which the members know it."""

    @abstractmethod
    def exchange(self, number: int, header: bytes, patience: Patience) -> list[bytes]:
        """Shows ``header`` as this group's operation ``number``; returns everybody's."""

    @abstractmethod
    def offer(self, peer: int, key: tuple[int, int], header: bytes, patience: Patience) -> Message:
        """Offers group rank ``peer`` a message; returns once the peer has shown its header."""

    @abstractmethod
    def accept(
        self, peer: int, key: tuple[int, int], answer: Callable[[], bytes], patience: Patience
    ) -> Message:
        """Waits for the message that ``peer`` offers under ``key`` and shows it our header.

        ``answer`` makes that, once there is an offer.
        """

    @abstractmethod
    def settle(self, number: int) -> None:
        """Says that this rank needs nothing more from the others for the first transfers.

        Args:
            number: How many transfers of the group this rank is through with.
        """

    @abstractmethod
    def unsettled(self, number: int) -> list[int]:
        """The world ranks that have not settled as many transfers.

        A rank asks before it goes: those that are not through yet may still need something of it.
        """


class Message(ABC):
    """A message both sides know of; its payload travels over the transport."""

    theirs: bytes
    """The other side's header."""
    ticket: int
    """A small number for the transport to tell open messages between two ranks apart."""

    @abstractmethod
    def finish(self, patience: Patience) -> None:
        """The receiver says it has everything; the sender waits for that."""

    @abstractmethod
    def abandon(self) -> None:
        """Both sides saw that their headers do not fit: nothing will be moved."""

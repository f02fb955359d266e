"""What ranks lend each other: the interface of those who hold tensors, and of those who read.

[Note: lent tensors]
A collective needs every rank's code; reading a lent tensor needs the reader's only, and so does a
*call*, which has a tensor handled by what the other rank lends: a `Shelf`, for example, keeps it
until it is called for. Where ranks are threads, the reader takes a copy directly. Where they are
processes, each has a thread that serves the others over sockets and through host memory, whatever
the backend: neither NCCL nor MPI is ever called from a second thread. The thread starts with the
first lending and ends with the world. A forked child does not serve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.errors import NotHeldError
from shoal.system.deadline import Deadline

MOST_NAMED = 8
"""Of the keys that a rank holds, in the text of an error."""


class Lent(NamedTuple):
    """A tensor as its holder keeps it.

    Attributes:
        tensor: The values, on the holder's device.
        ready: When they are computed, on a GPU; None elsewhere.
    """

    tensor: Tensor
    ready: torch.cuda.Event | None = None


class Answer(NamedTuple):
    """What comes of a call: plain data, and perhaps a tensor."""

    data: dict[str, Any]
    values: Tensor | None = None


class LendingSource(Protocol):
    """What one rank lends. Any thread may call it."""

    def find(self, key: str) -> Lent | None:
        """The tensor of that key; raises a `ShoalError` if it must not be read any more."""

    def listing(self) -> list[list[Any]]:
        """For each tensor plain data, of which the first is its key."""


@runtime_checkable
class CalledSource(LendingSource, Protocol):
    """What also answers calls. Any thread may call it, several at once."""

    def handle(self, request: dict[str, Any], values: Tensor | None) -> Answer:
        """Does what another rank asks for; quickly, for the others wait meanwhile.

        ``request`` and what is answered are plain data; tensors are the CPU's. What it raises is
        raised by the rank that called.
        """


class PeerTensors(ABC):
    """The tensors that the ranks of one group lend each other; ranks are those of the group."""

    takes_time: ClassVar[bool]
    """Whether reading has to wait for something, so that a thread may do it meanwhile."""

    @abstractmethod
    def read(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """A copy of another rank's tensor.

        Raises:
            NotHeldError: The rank has no such tensor, or has closed what held it.
            PeerError: The rank has died, left or is stopped.
            DeadlineError: It does not answer in time.
        """

    @abstractmethod
    def listing(self, rank: int, deadline: Deadline) -> list[list[Any]]:
        """What another rank lends now."""

    @abstractmethod
    def call(
        self, rank: int, request: dict[str, Any], values: Tensor | None, deadline: Deadline
    ) -> Answer:
        """Has a rank's source handle a request; its own rank's directly.

        Raises:
            ShoalError: What the source has raised, as text.
            PeerError: The rank has died, left or is stopped.
            DeadlineError: It does not answer in time.
        """

    @abstractmethod
    def absence(self, rank: int) -> str | None:
        """Why a rank does nothing any more; None if it may."""

    @abstractmethod
    def hand_over(self) -> bool:
        """Lets other ranks go on where they take turns; whether any of them could."""

    @abstractmethod
    def close(self) -> None:
        """Lends nothing any more. Twice is fine."""


def not_held(rank: int, key: str, listing: list[list[Any]] | None) -> NotHeldError:
    """For a key that a world rank does not have; without a listing it lends nothing at all."""
    if listing is None:
        return NotHeldError(
            f"rank {rank} does not hold {key!r}: it has closed its manager, or has made fewer "
            "managers than this rank. Close managers after a barrier, when no rank fetches any more"
        )
    keys = [repr(entry[0]) for entry in listing]
    named = ", ".join(keys[:MOST_NAMED]) + (", ..." if len(keys) > MOST_NAMED else "")
    return NotHeldError(f"rank {rank} does not hold {key!r}; it holds {named or 'nothing'}")

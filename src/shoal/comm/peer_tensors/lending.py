"""What ranks lend each other: the interface of those who hold tensors, and of those who read.

[Note: lent tensors]
A collective needs every rank's code; reading a lent tensor needs the reader's only. Where ranks are
threads, the reader takes a copy directly. Where they are processes, each has a thread that serves
the others over sockets and through host memory, whatever the backend: neither NCCL nor MPI is ever
called from a second thread. By the same ways a rank gives tensors to another one, whose `Shelf`
keeps them, and takes them back. The thread starts with the first lending and ends with the world. A
forked child does not serve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

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


class LendingSource(Protocol):
    """What one rank lends. Any thread may call it."""

    def find(self, key: str) -> Lent | None:
        """The tensor of that key; raises a `ShoalError` if it must not be read any more."""

    def listing(self) -> list[list[Any]]:
        """For each tensor plain data, of which the first is its key."""


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
    def give(self, rank: int, key: str, tensor: Tensor, deadline: Deadline) -> None:
        """Has another rank keep a tensor of bytes on its `Shelf`; its code takes no part.

        Raises:
            ShoalError: The rank has no room.
            PeerError, DeadlineError: As for `read`.
        """

    @abstractmethod
    def take(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """Takes back what was given, as `read`; the other rank lets go of it."""

    @abstractmethod
    def drop(self, rank: int, keys: Sequence[str], deadline: Deadline) -> None:
        """Has another rank let go of what was given."""

    @abstractmethod
    def listing(self, rank: int, deadline: Deadline) -> list[list[Any]]:
        """What another rank lends now."""

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

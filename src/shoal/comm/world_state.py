"""What the groups of one world have in common on one rank, and what becomes of it in a fork."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.comm.accounting import Statistics
from shoal.comm.control.exit_records import ExitRecords
from shoal.errors import ClosedError, MismatchError

if TYPE_CHECKING:
    from shoal.comm.backend import Backend
    from shoal.comm.peer_tensors.lending import PeerTensors
    from shoal.comm.peer_tensors.server import TensorServer

DEFAULT_TIMEOUT_S = 600.0
# For worlds inside one process.
_OF_THIS_PROCESS = secrets.token_bytes(32)


@dataclass(eq=False)
class WorldState:
    """What the groups of one world have in common on one rank.

    Attributes:
        timeout: Seconds an alive but late rank is waited for.
        secret: What only the ranks of this world know; their pickles prove it. None: no pickles.
        statistics: Counters of all groups.
        next_group_id: The next group number that this rank has not used.
        groups: The world's backend and those of its groups.
        exit_records: What this rank leaves behind for ranks that exit after it.
        close_bootstrap: Ends what the ranks met at, which may live in this process.
        parting: How this rank leaves, if it does so by a call of its own, for ranks that wait.
        next_lending: The next number of lent tensors that this rank has not used.
        lendings: What this rank lends and borrows now, see [Note: lent tensors].
        tensor_server: Serves what this rank lends, once it has lent something.
        mismatch: What was found too late to be harmless; no group can be used any more.
        is_closed: Whether the world was shut down.
        is_forked: Whether this process is a child of the rank's, which the others know nothing of.
    """

    timeout: float = DEFAULT_TIMEOUT_S
    secret: bytes | None = _OF_THIS_PROCESS
    statistics: Statistics = field(default_factory=Statistics)
    next_group_id: int = 1
    groups: list[Backend] = field(default_factory=list)
    exit_records: ExitRecords = field(default_factory=ExitRecords)
    close_bootstrap: Callable[[], None] = lambda: None
    parting: str = ""
    next_lending: int = 0
    lendings: list[PeerTensors] = field(default_factory=list)
    tensor_server: TensorServer | None = None
    mismatch: MismatchError | None = None
    is_closed: bool = False
    is_forked: bool = False

    def __post_init__(self) -> None:
        """Known to this process, should it be forked."""
        _states.add(self)

    def end_lendings(self) -> None:
        """Nobody reads this rank's tensors any more, nor this rank theirs."""
        for lending in list(self.lendings):
            lending.close()
        if self.tensor_server is not None:
            self.tensor_server.close()


_states: weakref.WeakSet[WorldState] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child has the memory and the connections of its rank, and must not use them."""
    for state in list(_states):
        state.is_closed = state.is_forked = True


os.register_at_fork(after_in_child=_close_in_child)


def closed_error(state: WorldState, rank: int) -> ClosedError:
    """For calls in a world that is closed here."""
    if not state.is_forked:
        return ClosedError("this world was shut down; call shoal.init() to start another")
    return ClosedError(
        f"process {os.getpid()} was forked from rank {rank} and cannot take part in its place: "
        "the ranks would lose count of each other's calls. Hand its results to the rank (through a "
        "pipe or a queue) and communicate there, or start ranks with shoal.run()"
    )

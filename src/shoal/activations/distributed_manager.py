"""`DistributedCheckpointManager`: activations that ranks keep for each other."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor

from shoal.activations.checkpoint_manager import (
    CheckpointManager,
    Recompute,
    check_activation,
    check_layer_id,
    check_whole,
)
from shoal.activations.directory import CheckpointDirectory
from shoal.activations.memory_stats import DistributedMemoryStats, MemoryStats
from shoal.comm import Backend, World
from shoal.comm.work import ThreadedWork
from shoal.comm.world import current
from shoal.errors import (
    ClosedError,
    DeadlineError,
    MismatchError,
    NotHeldError,
    PeerError,
    ShoalError,
)
from shoal.system.deadline import Deadline
from shoal.system.site import describe

# Messages by layer have the upper half of the tags.
_FIRST_TAG = 1 << 30


class DistributedCheckpointManager:
    """The activations that the ranks of a group keep, for themselves and for each other.

    All ranks of the group make it together. `register_checkpoint` and `retrieve_or_fetch` are each
    rank's own; the rest is called by all ranks alike.

    Attributes:
        local_manager: What this rank keeps.
        directory: Who holds what, as of the last `synchronize_checkpoints`.

    Example:
        >>> import shoal, torch
        >>> def borrow():
        ...     with DistributedCheckpointManager() as manager:
        ...         if manager.rank == 1:
        ...             manager.register_checkpoint("block 3", torch.ones(4))
        ...         shoal.world().barrier()
        ...         total = manager.retrieve_or_fetch("block 3").sum().item()
        ...         shoal.world().barrier()
        ...     return total
        >>> shoal.run(borrow, ranks=2, backend="memory")
        [4.0, 4.0]
    """

    def __init__(
        self, backend: Backend | World | None = None, *, timeout: float | None = None
    ) -> None:
        """Begins to lend what is registered.

        Args:
            backend: The ranks: the current world's by default, or any group's.
            timeout: Seconds that a fetch may take; the world's timeout by default.
        """
        found = current() if backend is None else backend
        self._backend = found.backend if isinstance(found, World) else found
        if not isinstance(self._backend, Backend):
            raise TypeError(f"backend must be a world or a group of ranks; got {backend!r}")
        seconds: Any = self._backend.timeout if timeout is None else timeout
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"timeout must be a number of seconds above 0; got {timeout!r}")
        self._timeout = seconds
        self.local_manager = CheckpointManager(self._backend.open_account())
        self.directory = CheckpointDirectory(size=self._backend.size)
        self._coming: dict[tuple[str, int | None], ThreadedWork[Tensor]] = {}
        self._peers = self._backend.lend(self.local_manager)

    def open_manager(self) -> CheckpointManager:
        """Another manager for this rank alone, whose memory `world.stats` counts, too."""
        return CheckpointManager(self._backend.open_account())

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._backend.size

    # Each rank on its own -----------------------------------------------------------------------

    def register_checkpoint(
        self, layer_id: str, activation: Tensor, *, stage: int | None = None
    ) -> None:
        """Keeps an activation on this rank; the others can fetch it from now on."""
        self.local_manager.register_checkpoint(layer_id, activation, stage=stage)

    def retrieve_or_fetch(
        self, layer_id: str, source_rank: int | None = None, *, recompute: Recompute | None = None
    ) -> Tensor:
        """An activation: this rank's own, or a copy of another's, whose code takes no part.

        Args:
            layer_id: Its name.
            source_rank: Who is to have it. By default this rank, then the ranks that the directory
                names, then all others.
            recompute: What to call instead where the holder cannot give it: it died or left, does
                not have it, or did not answer in time.

        Raises:
            NotHeldError: Nobody who was asked has it.
            PeerError: The rank that should have it has died, left or is stopped.
            DeadlineError: It did not answer in time.
        """
        self._check(layer_id, source_rank)
        try:
            if source_rank in (None, self.rank):
                found = self.local_manager.find(layer_id)
                if found is not None:
                    return found.tensor
            coming = self._coming.pop((layer_id, source_rank), None)
            return self._fetch(layer_id, source_rank) if coming is None else coming.wait()
        except (NotHeldError, PeerError, DeadlineError):
            if recompute is None:
                raise
            return recompute()

    def prefetch(self, layer_id: str, source_rank: int | None = None) -> None:
        """Begins to fetch what `retrieve_or_fetch` will be asked for, while this rank computes."""
        self._check(layer_id, source_rank)
        is_local = source_rank in (None, self.rank) and layer_id in self.get_checkpoint_keys()
        key = (layer_id, source_rank)
        if is_local or key in self._coming:
            return
        work = ThreadedWork(lambda: self._fetch(layer_id, source_rank), f"a fetch of {layer_id!r}")
        self._coming[key] = work
        if self._peers.takes_time:
            work.start_thread("shoal-prefetch")
        else:
            work.carry_out()

    def get_checkpoint_keys(self) -> list[str]:
        """The names of what this rank keeps."""
        return self.local_manager.get_checkpoint_keys()

    def list_checkpoints(self, rank: int) -> list[tuple[str, int | None]]:
        """Names and stages of what a rank keeps now; its code takes no part."""
        self._check_rank("rank", rank)
        if rank == self.rank:
            listing = self.local_manager.listing()
        else:
            listing = self._peers.listing(rank, Deadline(self._timeout))
        return [(str(key), stage) for key, _, _, stage in listing]

    def close(self) -> None:
        """Lets go of everything that this rank keeps, and lends nothing any more. Twice is fine.

        Ranks that fetch from this one afterwards are told so: let all come to a barrier first.
        """
        if not self.local_manager.is_closed:
            self.local_manager.close()
            self._peers.close()
            for work in self._coming.values():
                work.join()
            self._coming.clear()

    def __enter__(self) -> Self:
        """For ``with``: closes at the end."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # All ranks together -------------------------------------------------------------------------

    def register_checkpoint_broadcast(
        self, layer_id: str, activation: Tensor | None = None, source_rank: int = 0
    ) -> None:
        """Every rank ends up with the activation of ``source_rank``; all ranks call it."""
        self._check(layer_id, source_rank)
        is_source = self.rank == source_rank

        def check() -> str:
            if is_source:
                check_activation(activation)
            return layer_id

        names = self._together(check)
        if len(set(names)) > 1:
            raise MismatchError(f"the ranks broadcast different activations: {names}, by rank")
        sent = self._backend.broadcast(activation if is_source else None, root=source_rank)
        self.register_checkpoint(layer_id, sent)

    def synchronize_checkpoints(self, *, fill: bool = False) -> CheckpointDirectory:
        """Tells every rank who holds what; all ranks call it.

        Args:
            fill: Whether each rank also fetches and keeps what it does not have.

        Returns:
            The directory, the same on every rank. It names disagreements: activations of one name
            that differ in shape or dtype.

        Raises:
            MismatchError: On every rank, if one is to be filled in of which ranks hold different
                tensors.
        """
        self.directory = CheckpointDirectory.of(self._together(self.local_manager.listing))
        if fill:
            self._together(self._fill)
            self.directory = CheckpointDirectory.of(self._together(self.local_manager.listing))
        return self.directory

    def clear_checkpoints_distributed(self) -> None:
        """Lets go of all activations on every rank; all ranks call it."""
        self._check_open()
        self._coming.clear()
        self.local_manager.clear_checkpoints()
        self.directory = CheckpointDirectory(size=self.world_size)
        self._backend.barrier()

    def get_aggregated_memory_stats(self) -> DistributedMemoryStats:
        """The figures of all ranks, the same on every rank; all ranks call it."""
        own = self.local_manager.get_memory_stats()
        figures = [own.current_memory_used, own.peak_memory_used, own.checkpoint_count]
        said = self._backend.all_gather_object([figures, time.time()])
        ranks = [MemoryStats(*each) for each, _ in said]
        return DistributedMemoryStats.of(ranks, timestamp=said[0][1])

    def send_checkpoint(self, layer_id: str, destination_rank: int) -> None:
        """Sends an activation of this rank to one that calls `receive_checkpoint`."""
        self._check(layer_id, destination_rank)
        found = self.local_manager.find(layer_id)
        if found is None:
            raise NotHeldError(f"rank {self.rank} does not hold {layer_id!r} and cannot send it")
        tag = _tag_of(layer_id)
        self._backend.send_object(layer_id, destination_rank, tag)
        self._backend.send(found.tensor, destination_rank, tag)

    def receive_checkpoint(self, layer_id: str, source_rank: int) -> Tensor:
        """Receives an activation that a rank sends with `send_checkpoint`, and keeps it."""
        self._check(layer_id, source_rank)
        tag = _tag_of(layer_id)
        name = self._backend.recv_object(source_rank, tag)
        received: Tensor = self._backend.recv(src=source_rank, tag=tag)
        if name != layer_id:  # names may share a tag
            raise MismatchError(f"rank {source_rank} sent {name!r} where {layer_id!r} was expected")
        self.register_checkpoint(layer_id, received)
        return received

    # Inside -------------------------------------------------------------------------------------

    def _fetch(self, layer_id: str, source_rank: int | None) -> Tensor:
        deadline = Deadline(self._timeout)
        problems: list[ShoalError] = []
        for rank in self._holders(layer_id, source_rank):
            try:
                return self._peers.read(rank, layer_id, deadline)
            except (NotHeldError, PeerError) as error:
                problems.append(error)
        # A rank that is gone may have been the one that had it.
        raise next((each for each in problems if isinstance(each, PeerError)), None) or (
            problems[0] if len(problems) == 1 else self._nobody(layer_id)
        )

    def _holders(self, layer_id: str, source_rank: int | None) -> Iterator[int]:
        """Whom to ask, in order: each rank begins behind itself, so that none is asked by all."""
        if source_rank is not None:
            yield from () if source_rank == self.rank else (source_rank,)
            return
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        known = self.directory.holders.get(layer_id, ())
        yield from (rank for rank in others if rank in known)
        yield from (rank for rank in others if rank not in known)

    def _nobody(self, layer_id: str) -> NotHeldError:
        keys = self.get_checkpoint_keys()
        return NotHeldError(
            f"no rank that was asked by rank {self.rank} holds {layer_id!r}; it holds "
            f"{keys or 'nothing'} itself. Register the activation first, or say recompute="
        )

    def _fill(self) -> None:
        missing = self.directory.missing(self.rank)
        for key in missing:
            if key in self.directory.disagreements:
                raise MismatchError(f"nothing was filled in: {self.directory.disagreements[key]}")
        for key in missing:
            self.register_checkpoint(key, self._fetch(key, None))

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """What it gives on every rank; an error of one rank is raised on all."""
        self._check_open()
        own: Exception | None = None
        said: list[Any]
        try:
            said = [True, act()]
        except Exception as error:
            own, said = error, [False, describe(error)]
        everybody = self._backend.all_gather_object(said)
        if own is not None:
            raise own
        for rank, (is_fine, value) in enumerate(everybody):
            if not is_fine:
                raise PeerError(self._backend.ranks[rank], str(value), "a call of all ranks")
        return [value for _, value in everybody]

    def _check(self, layer_id: str, rank: int | None) -> None:
        check_layer_id(layer_id)
        self._check_open()
        if rank is not None:
            self._check_rank("source_rank", rank)

    def _check_open(self) -> None:
        if self.local_manager.is_closed:
            raise ClosedError("this manager of activations was closed; make another one")

    def _check_rank(self, what: str, rank: int) -> None:
        check_whole(what, rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{what} must be a rank from 0 to {self.world_size - 1}; got {rank}")


def _tag_of(layer_id: str) -> int:
    return _FIRST_TAG + zlib.crc32(layer_id.encode()) % _FIRST_TAG

"""`InMemoryBackend`: ranks are threads of one process, for tests, notebooks and debuggers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import Backend, WorldState
from shoal.comm.control.plane import Failure
from shoal.comm.memory.meeting import Meeting
from shoal.comm.memory.simulator import Simulator
from shoal.comm.operation import Operation
from shoal.comm.operation.header import Header
from shoal.comm.work import Work
from shoal.errors import DeadlineError, DeadlockError, ShoalError
from shoal.system.site import call_site, describe
from shoal.torch_internals.autograd import is_tracing


class InMemoryBackend(Backend):
    """A deterministic world of threads that take turns; see [Note: the baton].

    Example:
        >>> import shoal, torch
        >>> def mean():
        ...     backend = shoal.world().backend
        ...     return backend.all_reduce(torch.tensor([float(backend.rank)]), "average").item()
        >>> shoal.run(mean, ranks=4, backend="memory")
        [1.5, 1.5, 1.5, 1.5]
    """

    name = "memory"

    def __init__(
        self,
        state: WorldState,
        simulator: Simulator,
        ranks: Sequence[int],
        world_rank: int,
        group_id: int = 0,
    ) -> None:
        """Use `shoal.run`, or `InMemoryBackend.alone` for a world of one."""
        super().__init__(state, ranks, list(ranks).index(world_rank))
        self._simulator, self._world_rank, self._group_id = simulator, world_rank, group_id
        self._number = 0
        self._messages: dict[tuple[int, int, int], int] = defaultdict(int)

    @classmethod
    def alone(cls, timeout: float) -> InMemoryBackend:
        """A world of one rank, in the calling thread."""
        return cls(WorldState(timeout=timeout), Simulator(1, timeout), [0], 0)

    def _collective(self, operation: Operation, async_op: bool) -> Any:
        self._number += 1
        key = (self._group_id, self.ranks, self._number)
        work = self._arrive(operation, key, self.ranks, self._number)
        return work if async_op else work.wait()

    def _message(self, operation: Operation, peer: int, tag: int, async_op: bool) -> Any:
        pair = (self.rank, peer) if operation.kind == "send" else (peer, self.rank)
        # Both sides count the messages of a tag, so the n-th send meets the n-th receive.
        self._messages[*pair, tag] += 1
        number = self._messages[*pair, tag]
        ranks = [self.ranks[member] for member in pair]
        work = self._arrive(
            operation, (self._group_id, self.ranks, *pair, tag, number), ranks, number
        )
        return work if async_op else work.wait()

    def _arrive(
        self, operation: Operation, key: tuple[object, ...], ranks: Sequence[int], number: int
    ) -> SimulatedWork:
        if operation.source is not None:
            _finish_side_stream(operation.source)
        header = Header(operation.signature, operation.meta, b"", call_site())
        note = f"{operation.signature} (#{number} of ranks {list(ranks)}) at {header.site}"
        self._simulator.notes[self._world_rank] = note
        self._simulator.check(self._world_rank)
        meeting = self._simulator.meeting(key, ranks, number)
        meeting.arrive(self._world_rank, operation, header)
        return SimulatedWork(self, operation.kind, meeting)

    def _wait(self, meeting: Meeting) -> Tensor | None:
        if is_tracing():
            # Only one thread at a time may trace: the others would never get there.
            raise ShoalError(
                "ranks that are threads cannot communicate while torch.compile traces one of them. "
                "Compile the plain module, or parts of it, before it is wrapped, or use processes"
            )
        try:
            self._simulator.wait(self._world_rank, meeting)
        except DeadlockError:  # no rank is ahead of the others
            raise
        except DeadlineError as error:  # out of step with the others for good
            self.fail(describe(error))
            raise
        return meeting.result(self._world_rank)

    def _count(self, kind: str, meeting: Meeting, seconds: float) -> None:
        num_bytes = meeting.num_bytes[self._world_rank]
        self._state.statistics.count(kind, num_bytes, seconds, seconds)

    def _make_group(self, members: Sequence[int], group_id: int) -> InMemoryBackend:
        ranks = [self.ranks[member] for member in members]
        return InMemoryBackend(self._state, self._simulator, ranks, self._world_rank, group_id)

    def fail(self, reason: str, *, culprit: int | None = None) -> None:
        """Tells all ranks that this one cannot go on; ``culprit`` if another is to blame."""
        rank = self._world_rank if culprit is None else culprit
        self._simulator.publish(Failure(rank, reason, time.monotonic_ns(), culprit is not None))

    def shutdown(self) -> None:
        """Leaves the world; ranks that wait for this one are told so."""
        if not self._state.is_closed:
            self._state.is_closed = True
            self._simulator.leave(self._world_rank)
            self._leave_exit_record()

    def _leave_exit_record(self) -> None:
        notes, records = self._simulator.notes, self._state.exit_records
        note = records.note()
        if note and self._simulator.failure is None:
            notes[self._world_rank] = note
            others = [rank for rank in range(self._simulator.size) if rank != self._world_rank]
            records.find(notes.__getitem__, others)


class SimulatedWork(Work[Any]):
    """An operation this rank has arrived at, and others perhaps not yet."""

    def __init__(self, backend: InMemoryBackend, kind: str, meeting: Meeting) -> None:
        """The meeting knows when it is over."""
        self._backend, self._kind, self._meeting = backend, kind, meeting
        self._is_counted = False

    def wait(self, timeout: float | None = None) -> Any:
        """Lets the others run until all have arrived.

        Time stands still while others run, so ``timeout`` does not matter: what would never
        end is known at once.
        """
        begin = time.perf_counter()
        result = self._backend._wait(self._meeting)
        if not self._is_counted:
            self._is_counted = True
            self._backend._count(self._kind, self._meeting, time.perf_counter() - begin)
        return result

    def is_done(self) -> bool:
        """Whether all have arrived."""
        return self._meeting.is_over


def _finish_side_stream(tensor: Tensor) -> None:
    """The last rank to arrive works on the tensors of all, on its own stream."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if stream != torch.cuda.default_stream(tensor.device):
            stream.synchronize()

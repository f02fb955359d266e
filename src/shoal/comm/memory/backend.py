"""Backend `memory`: ranks are threads of one process, for tests, notebooks and debuggers.

[Note: the baton]
One rank runs at a time. It keeps the baton until it has to wait for others, then hands it
to the next rank that can run. So a run repeats exactly, a debugger shows one thing at a
time, and the moment no rank can run is the moment a deadlock is known. The generators of
random numbers are shared by all threads of a process, so they are swapped with the baton.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import Backend
from shoal.comm.control.plane import Failure, absence_text
from shoal.comm.memory.meeting import Meeting
from shoal.comm.memory.peer_tensors import ThreadPeerTensors
from shoal.comm.operation import Operation
from shoal.comm.operation.base import Header
from shoal.comm.peer_tensors.lending import LendingSource, PeerTensors
from shoal.comm.work import Work
from shoal.comm.world_state import WorldState
from shoal.errors import DeadlineError, DeadlockError, PeerError, ShoalError
from shoal.system.deadline import Deadline, abandoned_error, turn_text
from shoal.system.public_call import call_site, origin, told
from shoal.system.rank_names import name_ranks
from shoal.system.site import describe, is_ours
from shoal.torch_internals.autograd import is_tracing
from shoal.torch_support.random_state import RandomState

# How long a late rank may still take to end once the others have given up on it.
_GRACE_S = 2.0
_LOOK_EVERY_S = 1.0


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

    def run(self, operation: Operation, *, async_op: bool = False) -> Any:
        """The last rank to arrive carries it out for all."""
        self._check_open()
        self._simulator.check_thread(self._world_rank, operation.signature)
        self._number += 1
        key = (self._group_id, self.ranks, self._number)
        work = self._arrive(operation, key, self.ranks, self._number)
        return work if async_op else work.wait()

    def _message(self, operation: Operation, peer: int, tag: int, async_op: bool) -> Any:
        self._simulator.check_thread(self._world_rank, operation.signature)
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
        site = origin(operation.signature, "group" if self._group_id else "world")
        header = Header(operation.signature, operation.meta, b"", site)
        note = told(operation.signature, site, f" (#{number} of ranks {list(ranks)})")
        self._simulator.notes[self._world_rank] = note
        self._simulator.check(self._world_rank)
        meeting = self._simulator.meeting(key, ranks, number)
        meeting.arrive(self._world_rank, operation, header)
        return SimulatedWork(self, operation.kind, meeting)

    def _wait(self, meeting: Meeting) -> Tensor | None:
        if not meeting.is_over:
            self._simulator.check_thread(self._world_rank, "wait()")
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

    def _make_group(self, members: Sequence[int], group_id: int) -> InMemoryBackend:
        ranks = [self.ranks[member] for member in members]
        return InMemoryBackend(self._state, self._simulator, ranks, self._world_rank, group_id)

    def lend(self, source: LendingSource) -> PeerTensors:
        """Read directly by the other threads."""
        self._check_open()
        return ThreadPeerTensors(self, self._state, self._simulator, source)

    def fail(self, reason: str, *, culprit: int | None = None) -> None:
        """Tells all ranks that this one cannot go on; ``culprit`` if another is to blame."""
        if self._state.is_forked:
            return
        rank = self._world_rank if culprit is None else culprit
        self._simulator.publish(Failure(rank, reason, time.monotonic_ns(), culprit is not None))

    def shutdown(self) -> None:
        """Leaves the world; ranks that wait for this one are told so."""
        if not self._state.is_closed:
            self._state.is_closed = True
            self._simulator.leave(self._world_rank)
            self._leave_exit_record()

    def abandon(self) -> None:
        """Leaves without a word: what was said in this world does not count any more."""
        self._state.is_closed = True
        self._state.end_lendings()
        self._simulator.exit(self._world_rank)

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
            backend, seconds = self._backend, time.perf_counter() - begin
            num_bytes = self._meeting.num_bytes[backend._world_rank]
            backend._state.statistics.count(self._kind, num_bytes, seconds, seconds)
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


class Simulator:
    """The ranks of one world in memory: whose turn it is, what each waits for, who failed."""

    def __init__(
        self,
        size: int,
        timeout: float,
        random: Sequence[RandomState] | None = None,
        loss: type[PeerError] = PeerError,
    ) -> None:
        """Rank 0 has the baton first; each rank starts with the caller's random state.

        Or with ``random``, one for each. ``loss`` is raised where a rank is gone.
        """
        self.size = size
        self.loss = loss
        self.failure: Failure | None = None
        self.notes = ["its own code, before any operation"] * size
        self._timeout = timeout
        self._holder, self._num_turns = 0, 0
        self._turn_began = time.monotonic()
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._threads: dict[int, int] = {}
        self._waiting: dict[int, Meeting] = {}
        self._gone: set[int] = set()
        self._deadlocked: set[int] = set()
        self._random = list(random or [RandomState.capture()] * size)
        self._meetings: dict[tuple[object, ...], Meeting] = {}
        self.lent: dict[tuple[int, int], LendingSource] = {}
        """What ranks lend each other, by the number of the lending and the rank."""

    # Turns ------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """The rank's thread begins; it runs when its turn comes."""
        self._threads[rank] = threading.get_ident()
        if rank != 0:
            self._await_turn(rank, None)
        self._random[rank].restore()

    def check_thread(self, rank: int, call: str) -> None:
        """Refuses threads that a rank has started: they have no turn of their own."""
        if self._threads.get(rank, threading.get_ident()) != threading.get_ident():
            raise ShoalError(
                f"thread {threading.current_thread().name!r} of rank {rank} called {call} at "
                f"{call_site()}: over memory, ranks are threads that take turns, and only the "
                "rank's own thread has one. Let that thread make the call, or use backend='shm'"
            )

    def leave(self, rank: int) -> None:
        """The rank takes part in nothing more: ranks that wait for it will be told."""
        self._gone.add(rank)

    def exit(self, rank: int) -> None:
        """The rank's thread ends."""
        self.leave(rank)
        self._threads.pop(rank, None)
        if self._holder == rank:
            self._pass_on(rank)

    def wait(self, rank: int, meeting: Meeting) -> None:
        """Returns once the meeting has taken place; other ranks run meanwhile."""
        if meeting.is_over:
            return
        self._waiting[rank] = meeting
        self._random[rank] = RandomState.capture()
        try:
            self._pass_on(rank)
            self._await_turn(rank, meeting)
            self._check_over(rank, meeting)
        except BaseException:
            meeting.withdraw(rank)
            raise
        finally:
            del self._waiting[rank]
        self._random[rank].restore()

    def hand_over(self, rank: int) -> bool:
        """Lets the others run before this rank goes on; whether any of them could."""
        self.check(rank)
        num_turns = self._num_turns
        self._random[rank] = RandomState.capture()
        self._pass_on(rank)
        self._await_turn(rank, None)
        self._random[rank].restore()
        self.check(rank)
        return self._num_turns > num_turns + 1

    def _pass_on(self, rank: int) -> None:
        successor = self._next_ready(rank)
        if successor is None and self._waiting:
            self._deadlocked |= set(self._waiting)
            successor = self._next_ready(rank)
        if successor is not None:
            self._holder = successor
            self._num_turns += 1
            self._turn_began = time.monotonic()
            self._turns[successor].release()

    def _next_ready(self, rank: int) -> int | None:
        for step in range(1, self.size + 1):
            candidate = (rank + step) % self.size
            if candidate not in self._gone and self._is_ready(candidate):
                return candidate
        return None

    def _is_ready(self, rank: int) -> bool:
        meeting = self._waiting.get(rank)
        return (
            meeting is None
            or meeting.is_over
            or self.failure is not None
            or rank in self._deadlocked
            or not self._gone.isdisjoint(meeting.missing())
        )

    def check(self, rank: int) -> None:
        """Raises if the world has failed already: nothing can be begun in it any more."""
        if self.failure is not None:
            raise self.loss(self.failure.rank, self.failure.reason, self.notes[rank])

    def absence(self, rank: int) -> str | None:
        """Why a rank gives nothing any more: it failed, or it left."""
        if self.failure is not None and self.failure.rank == rank:
            return self.failure.reason
        return absence_text("") if rank in self._gone else None

    def _check_over(self, rank: int, meeting: Meeting) -> None:
        """The rank runs again: because the meeting is over, or because it will never be."""
        is_deadlocked = rank in self._deadlocked
        self._deadlocked.discard(rank)
        if meeting.is_over:
            return
        self.check(rank)
        gone = self._gone.intersection(meeting.missing())
        if gone:
            raise self.loss(min(gone), absence_text(""), self.notes[rank])
        assert is_deadlocked
        raise DeadlockError(self._deadlock_report())

    def _deadlock_report(self) -> str:
        lines = ["no rank can go on, each waits for another:"]
        for rank, meeting in sorted(self._waiting.items()):
            missing = name_ranks(meeting.missing())
            lines.append(f"  rank {rank} waits for {missing} in {self.notes[rank]}")
        return "\n".join(lines)

    # Deadlines: a rank that keeps the baton is late for all the others ------------------

    def _await_turn(self, rank: int, meeting: Meeting | None) -> None:
        begin, deadline = time.monotonic(), None
        while not self._turns[rank].acquire(timeout=min(_LOOK_EVERY_S, self._timeout / 2)):
            deadline = deadline or Deadline(self._timeout, begin)
            deadline.enforce(self._late_text, rank, meeting, since=self._turn_began)

    def _late_text(self, waited: float, rank: int, meeting: Meeting | None) -> str:
        if meeting is None or meeting.is_over:
            waits = f"for its turn, after {self.notes[rank]}"
        else:
            waits = f"in {self.notes[rank]}; arrived: {meeting.arrived()}"
        return turn_text(waited, rank, waits, self._holder, self._doing)

    def _doing(self) -> str:
        rank = self._holder
        return f"{self._position(rank)} (its last operation: {self.notes[rank]})"

    def _position(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads.get(rank, -1))
        while frame is not None and is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"

    # Meetings ---------------------------------------------------------------------------

    def meeting(self, key: tuple[object, ...], ranks: Sequence[int], number: int) -> Meeting:
        """The meeting of that key: the first to ask makes it, the last to arrive ends it."""
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(ranks, number)
        if len(meeting.missing()) == 1:
            del self._meetings[key]
        return meeting

    def publish(self, failure: Failure) -> None:
        """The first failure counts, unless it only passed on another's."""
        if self.failure is None:
            self.failure = failure

    def interrupt(self, error: BaseException) -> None:
        """The caller was interrupted: every rank ends at its next operation."""
        rank = self._holder
        reason = f"the caller was interrupted by {error!r} while it was at {self._position(rank)}"
        self.publish(Failure(rank, reason, time.monotonic_ns()))

    def is_abandoned(self, threads_alive: Iterable[bool]) -> bool:
        """Whether only the rank that keeps the baton is left, and the others gave up on it."""
        if self.failure is None or sum(threads_alive) != 1:
            return False
        held = time.monotonic() - self._turn_began
        known_for = time.monotonic() - self.failure.time_ns / 1e9
        return held > self._timeout and known_for > _GRACE_S

    def abandoned(self) -> DeadlineError:
        """Names the rank that was given up, and what it is doing."""
        return abandoned_error(self._timeout, self._holder, self._doing())

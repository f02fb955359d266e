"""What the ranks of one group tell each other around every transfer.

Look here for the order of operations, for how headers are compared, how a failed wait or transfer
becomes an error that names a rank, and for when a rank may leave.

[Note: leaving]
A rank that has its own result may leave while others still work on theirs, and need its
memory or its connections for that. So ranks count their transfers and show each other the
count; one that shuts down waits for a while until the others have got as far as itself.

[Note: threads of a rank]
The n-th operation of a rank in a group belongs to the n-th of the others. If two threads of a rank
call operations of one group at the same time, it is chance which comes first, and another rank may
have it the other way round: one thread would get the other's numbers. So that is an error. Threads
that take turns, by a lock or by waiting for each other, are fine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shoal.comm.control.deadlock.record import OPERATION
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Control, Failure
from shoal.comm.operation import Operation, Payload, writing
from shoal.comm.operation.base import Header, check_equal, decode
from shoal.comm.work import ThreadedWork, WorkQueue
from shoal.comm.world_state import WorldState, closed_error
from shoal.errors import DeadlineError, MismatchError, ShoalError, TransportError
from shoal.system.public_call import call_site, told
from shoal.system.rank_names import name_ranks
from shoal.system.site import describe

# How long to wait for the news of a rank's death after the transport already failed over it.
_NEWS_S = 3.0
_LEAVE_S = 5.0
_POLL_S = 0.001
_MOST_COMPARED = 1024


class Coordination:
    """One rank's side of the order of operations in one group.

    Attributes:
        queue: The thread for operations that nobody waits for, once there was one.
        number: Of the operation that was begun last.
        group_id: By which the members know the group.
        group_name: What users know the group as, where several have the same ranks.
        called: "world" or "group", as in the user's calls.
        num_settled: How many transfers are over on this rank, see [Note: leaving].
        is_in_step: Whether all ranks have called the same operations so far.
        is_through_at_once: Whether a transfer is over when the transport returns, not only queued
            on a device.
    """

    def __init__(
        self, state: WorldState, control: Control, channel: Channel, transport: str
    ) -> None:
        """``transport`` names the backend in errors. The first group of a world has all ranks."""
        self._state, self._control, self._channel = state, control, channel
        self._transport = transport
        self._rank = list(channel.ranks).index(control.rank)
        self._group = f"group {tuple(channel.ranks)}" if state.groups else "the world"
        self.called = "group" if state.groups else "world"
        self.group_id = channel.group_id
        self._deadlocks = control.deadlocks
        self._long_waits = {} if control.deadlocks is None else control.deadlocks.waits
        self.group_name = f"group {channel.group_id} of {name_ranks(channel.ranks)}"
        if not state.groups:
            self.group_name = self._group
        self._lock = threading.Lock()
        self._holder = 0
        self.queue: WorkQueue | None = None
        self.number = 0
        self.num_settled = 0
        self.is_in_step = True
        self.is_through_at_once = True
        # A training loop compares the same headers again and again.
        self._compared: dict[bytes, tuple[Sequence[bytes], list[Header], list[bytes]]] = {}

    # Threads ----------------------------------------------------------------------------

    def enter(self) -> None:
        """From here to `leave` this thread gives an operation its number, or carries it out."""
        if not self._lock.acquire(blocking=False):
            self._refuse_thread()
        self._holder = threading.get_ident()

    def leave(self) -> None:
        """Other threads may call operations now; see [Note: threads of a rank]."""
        self._lock.release()

    def _refuse_thread(self) -> NoReturn:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        other, own = names.get(self._holder, "another"), threading.current_thread().name
        error = ShoalError(
            f"threads {other!r} and {own!r} of this rank called operations of {self.group_name} at "
            f"the same time (the second one at {call_site()}): which comes first is chance, and "
            "other ranks may have them the other way round. Give each thread a group of its own "
            "(world.subgroup(range(world.size)) on every rank, one after the other), or let one "
            "thread make all calls"
        )
        self.fail(describe(error))
        raise error

    def is_idle(self) -> bool:
        """Whether all operations that were queued have been carried out."""
        return self.queue is None or self.queue.is_idle()

    def finish_queued(self, what: str) -> None:
        """Waits until all operations that were queued have been carried out."""
        if not self.is_idle():
            self.start_queue().put(ThreadedWork(lambda: None, what)).wait()

    def start_queue(self) -> WorkQueue:
        """The queue, made when it is first needed."""
        if self.queue is None:
            self.queue = WorkQueue(f"shoal-{self._transport}-{self._control.rank}")
        return self.queue

    def check_process(self) -> None:
        """Refuses a forked child that would do this rank's part in something."""
        if self._state.is_forked:
            raise closed_error(self._state, self._control.rank)

    # Waiting ----------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Tells the others what this rank does, for their error messages."""
        self._control.note(text)

    def begin(
        self, signature: str, number: int, site: str, *, eager: bool, note: str | None = None
    ) -> Patience:
        """Notes what this rank does now; raises if the world has failed already.

        Waits that are ``eager`` may spin; ``note`` is the text for the others, if it is at hand.
        """
        self._control.note(note or told(signature, site))
        patience = self.patience(signature, number, site, eager=eager)
        patience.check()
        return patience

    def patience(self, signature: str, number: int, site: str, *, eager: bool) -> Patience:
        """For the waits of one operation. It keeps texts only: tensors may be freed meanwhile."""
        ranks, group = self._channel.ranks, self._group
        return Patience(
            self._control,
            lambda: told(signature, site, f" (operation #{number} of {group})"),
            ranks,
            self._state.timeout,
            eager=eager,
            awaited=(OPERATION, self.group_id, number, 0),
            group=self.group_name,
        )

    def or_fail(self, step: Callable[..., Any], *args: Any) -> Any:
        """A rank whose deadline passes is out of step with the others for good: tells them."""
        try:
            return step(*args)
        except DeadlineError as error:
            self.fail(describe(error))
            raise
        except ValueError:  # of the control page, which another thread has let go of meanwhile
            if self._state.is_closed:
                raise closed_error(self._state, self._control.rank) from None
            raise
        finally:
            if self._long_waits and self._deadlocks is not None:
                self._deadlocks.end()

    # Headers and payloads ---------------------------------------------------------------

    def prepare(
        self, operation: Operation, number: int, mine: bytes, shown: Sequence[bytes]
    ) -> Payload:
        """What moves, by the headers of all ranks; `MismatchError` unless they fit together."""
        headers, wires = self._compare(operation, number, mine, shown)
        payload = operation.prepare(headers, self._rank)
        payload.wires = wires
        return payload

    def foreseen(self, mine: bytes) -> Sequence[bytes] | None:
        """What all ranks showed when this rank last showed a header, if it ever did."""
        known = self._compared.get(mine)
        return None if known is None else known[0]

    def confirm(
        self,
        operation: Operation,
        number: int,
        mine: bytes,
        foreseen: Sequence[bytes],
        shown: Sequence[bytes],
    ) -> None:
        """Compares headers of an operation that was prepared with others, which were foreseen."""
        if shown != foreseen:
            headers, _ = self._compare(operation, number, mine, shown)
            expected = [decode(header) for header in foreseen]
            operation.reconsider(headers, expected, self._channel.ranks)

    def _compare(
        self, operation: Operation, number: int, mine: bytes, shown: Sequence[bytes]
    ) -> tuple[list[Header], list[bytes]]:
        known = self._compared.get(mine)
        if known is not None and known[0] == shown:
            return known[1:]
        headers = [decode(header) for header in shown]
        try:
            check_equal(headers, self._channel.ranks, number)
            operation.check(headers, self._channel.ranks)
        except MismatchError:
            self.is_in_step = False
            raise
        if len(self._compared) >= _MOST_COMPARED:
            self._compared.clear()
        wires = [header.wire for header in headers]
        self._compared[mine] = (shown, headers, wires)
        return headers, wires

    def carry_out(
        self,
        operation: Operation,
        payload: Payload,
        mover: Callable[[str], Callable[..., None]],
        patience: Patience,
        times: tuple[float, float],
    ) -> Any:
        """Has the transport move a payload; returns what the caller of the operation gets.

        ``mover`` leads from a kind of operation to what moves its payloads; ``times`` are when it
        began, and how long it waited for the others.
        """
        if payload.total:
            try:
                with writing(payload.target):
                    self.transport(mover(operation.kind), payload, patience)
            finally:  # a rank whose transfer failed is done with it as well: counts stay equal
                if self.is_through_at_once:
                    self.settle()
        result = operation.result()
        self.count(operation.kind, payload.num_bytes, *times)
        return result

    def transport(self, move: Callable[..., None], *args: Any) -> None:
        """Calls the transport and says who is to blame when it fails."""
        try:
            self.or_fail(move, *args)
        except ShoalError:
            raise
        except Exception as error:
            raise self.explained(error) from error

    def count(self, kind: str, num_bytes: int, begin: float, waited: float) -> None:
        """Adds an operation that is over to the counters."""
        self._state.statistics.count(kind, num_bytes, time.perf_counter() - begin, waited)

    # Failures ---------------------------------------------------------------------------

    def fail(self, reason: str, culprit: int | None = None) -> None:
        """Tells all ranks of the world that this one cannot go on."""
        rank = self._control.rank if culprit is None else culprit
        failure = Failure(rank, reason, time.monotonic_ns(), is_echo=culprit is not None)
        self._control.publish(failure)

    def explained(self, error: Exception) -> ShoalError:
        """Why a transfer failed: because of a rank that died, if news of one comes soon."""
        deadline = time.monotonic() + _NEWS_S
        while (failure := self._control.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if failure is None:
            return TransportError(f"the {self._transport} transport failed: {error}")
        doing = f"a transfer over {self._transport}"
        return self._control.lost(failure.rank, failure.reason, doing)

    # The end ----------------------------------------------------------------------------

    def settle(self) -> None:
        """One more transfer is over here."""
        self.num_settled += 1
        self._channel.settle(self.num_settled)

    def finish_queue(self) -> None:
        """Ends the thread of the queue once everything in it is carried out."""
        if self.queue is not None:
            self.queue.close()

    def await_others(self) -> None:
        """See [Note: leaving]."""
        deadline = time.monotonic() + _LEAVE_S
        while late := self._channel.unsettled(self.num_settled):
            is_pointless = all(self._control.absence(rank) is not None for rank in late)
            if is_pointless or self._control.failure() is not None or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

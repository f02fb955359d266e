"""What the backends whose ranks are processes have in common: agree first, then move.

A subclass carries payloads (`_all_reduce` and so on, see `Payload`) and need not know that
ranks may disagree, fail or be late.

[Note: leaving]
A rank that has its own result may leave while others still work on theirs, and need its
memory or its connections for that. So ranks count their transfers and show each other the
count; one that shuts down waits for a while until the others have got as far as itself.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from shoal.comm import operation as ops
from shoal.comm.backend import Backend, WorldState
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Control, Failure, Message
from shoal.comm.operation import Operation, Payload
from shoal.comm.operation.header import Header, check_equal, decode, encode
from shoal.comm.work import ThreadedWork, Work, WorkQueue
from shoal.errors import DeadlineError, MismatchError, PeerError, ShoalError, TransportError
from shoal.system.failure import describe
from shoal.system.site import call_site

# How long to wait for the news of a rank's death after the transport already failed over it.
_NEWS_S = 3.0
_FAREWELL_S = 5.0
# Ranks that leave at the same time should still hear of each other.
_LINGER_S = 0.5
_POLL_S = 0.001
_MOST_AGREED = 1024


class ProcessBackend(Backend):
    """A backend over a control plane and a transport."""

    worthwhile_bytes = 4 << 20
    _is_through_at_once: ClassVar[bool] = True
    """Whether a transfer is over when the call returns, not only queued on a device."""

    def __init__(
        self, state: WorldState, control: Control, channel: Channel, ranks: Sequence[int]
    ) -> None:
        """``ranks`` are the members' world ranks in group order."""
        super().__init__(state, ranks, list(ranks).index(control.rank))
        self._control = control
        self._channel = channel
        state.allow_pickle = control.is_private
        self._number = 0
        self._num_settled = 0
        self._messages: dict[tuple[str, int, int], int] = defaultdict(int)
        self._queue = WorkQueue(f"shoal-{self.name}-{control.rank}")
        self._errands: list[ThreadedWork[Any]] = []
        # A training loop agrees on the same headers again and again.
        self._agreed: dict[bytes, tuple[list[bytes], list[Header]]] = {}
        self._is_in_step = True
        self._stuck: MismatchError | None = None
        self._lock = threading.Lock()
        self._message_lock = threading.Lock()  # a message need not wait for a collective
        state.groups.append(self)

    # What a transport implements: tensors are flat, contiguous and not all empty --------

    @abstractmethod
    def _all_reduce(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _reduce(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _broadcast(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _all_gather(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _gather(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _scatter(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _all_to_all(self, payload: Payload, patience: Patience) -> None: ...

    @abstractmethod
    def _send(self, payload: Payload, message: Message, patience: Patience) -> None: ...

    @abstractmethod
    def _recv(self, payload: Payload, message: Message, patience: Patience) -> None: ...

    def _expose(self, operation: Operation, number: int) -> bytes:
        """Runs before the ranks agree; what it returns reaches the others' payload as wires."""
        return b""

    def _check_tensor(self, tensor: Tensor) -> None:
        """Refuses tensors that the transport cannot carry."""

    def _close_transport(self) -> None:
        """Lets go of what the transport holds. Other ranks may still be at work."""

    # Collectives ------------------------------------------------------------------------

    def _collective(self, operation: Operation, async_op: bool) -> Any:
        if operation.source is not None:
            self._check_tensor(operation.source)
        with self._lock:
            self._finish_posted()
            self._number += 1
            is_inline = not async_op and self._queue.is_idle()
            task = partial(self._perform, operation, self._number, call_site(), is_inline)
            if is_inline:
                return task()
            work = self._queue.put(ThreadedWork(task, operation.signature))
        return work if async_op else work.wait()

    def _finish_posted(self) -> None:
        """Waits for what was shown to the others and not carried out yet."""

    @property
    def is_in_step(self) -> bool:
        """Whether the ranks have called the same operations so far."""
        return self._is_in_step

    def _perform(self, operation: Operation, number: int, site: str, eager: bool) -> Any:
        begin = time.perf_counter()
        if self._stuck is not None:
            raise self._stuck
        where = self._where(operation, number, site)
        patience = self._patience(where, eager)
        patience.check()
        try:
            headers = self._or_fail(self._agree, operation, number, site, patience)
        except MismatchError as error:
            if self.is_lane and not eager:  # others are queued behind it, which nobody else calls
                self._stuck = error
            raise
        waited = time.perf_counter() - begin
        payload = operation.prepare(headers, self.rank)
        payload.wires = [header.wire for header in headers]
        return self._carry_out(operation, payload, patience, (begin, waited))

    def _carry_out(
        self,
        operation: Operation,
        payload: Payload,
        patience: Patience,
        times: tuple[float, float],
    ) -> Any:
        if payload.total:
            with ops.writing(payload.target):
                self._or_fail(self._move, operation.kind, payload, patience)
            if self._is_through_at_once:
                self._settle()
        result = operation.result()
        self._count(operation.kind, payload, *times)
        return result

    def _or_fail(self, step: Callable[..., Any], *args: Any) -> Any:
        """A rank that gives up is out of step with the others for good, so they must know."""
        try:
            return step(*args)
        except DeadlineError as error:
            self.fail(describe(error))
            raise

    def _where(self, operation: Operation, number: int, site: str) -> Callable[[], str]:
        signature = operation.signature  # whoever keeps the text must not keep the tensors

        def text() -> str:
            return self._named(signature, number, site)

        self._control.note(f"{signature} at {site}")
        return text

    def _named(self, signature: str, number: int, site: str) -> str:
        is_world = self._state.groups[0] is self
        group = "the world" if is_world else f"group {self.ranks}"
        return f"{signature} (operation #{number} of {group}) at {site}"

    def _patience(self, where: Callable[[], str], eager: bool) -> Patience:
        return Patience(self._control, where, self.ranks, self.timeout, eager=eager)

    def _agree(
        self, operation: Operation, number: int, site: str, patience: Patience
    ) -> list[Header]:
        wire = self._expose(operation, number)
        mine = Header(operation.signature, operation.meta, wire, site)
        encoded = encode(mine)
        shown = self._channel.exchange(number, encoded, patience)
        return self._compare(operation, number, encoded, shown)

    def _compare(
        self, operation: Operation, number: int, encoded: bytes, shown: list[bytes]
    ) -> list[Header]:
        """Everybody's header, given that they fit together."""
        known = self._agreed.get(encoded)
        if known is not None and known[0] == shown:
            return known[1]
        headers = [decode(header) for header in shown]
        try:
            check_equal(headers, self.ranks, number)
            operation.check(headers, self.ranks)
        except MismatchError:
            self._is_in_step = False
            raise
        if len(self._agreed) >= _MOST_AGREED:
            self._agreed.clear()
        self._agreed[encoded] = (shown, headers)
        return headers

    def _move(self, kind: str, payload: Payload, patience: Patience) -> None:
        if self.size == 1:
            _move_alone(payload)
        else:
            self._transport(getattr(self, f"_{kind}"), payload, patience)

    def _transport(self, move: Callable[..., None], *args: Any) -> None:
        """Calls the transport and says who is to blame when it fails."""
        try:
            move(*args)
        except ShoalError:
            raise
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> ShoalError:
        deadline = time.monotonic() + _NEWS_S
        while (failure := self._control.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if failure is None:
            return TransportError(f"the {self.name} transport failed: {error}")
        return PeerError(failure.rank, failure.reason, f"a transfer over {self.name}")

    def _count(self, kind: str, payload: Payload, begin: float, waited: float) -> None:
        seconds = time.perf_counter() - begin
        self._state.statistics.count(kind, payload.num_bytes, seconds, waited)

    # Messages ---------------------------------------------------------------------------

    def _message(self, operation: Operation, peer: int, tag: int, async_op: bool) -> Any:
        if operation.source is not None:
            self._check_tensor(operation.source)
        key = self._message_key(operation, peer, tag)
        task = partial(self._deliver, operation, peer, key, call_site(), not async_op)
        if not async_op:
            return task()
        return self._start_errand(ThreadedWork(task, operation.signature))

    def _message_key(self, operation: Operation, peer: int, tag: int) -> tuple[int, int]:
        # Both sides count the messages of a tag, so the n-th send meets the n-th receive
        # in whatever order threads get to run.
        counter = (operation.kind, peer, tag)
        with self._message_lock:
            self._messages[counter] += 1
            return (tag, self._messages[counter])

    def _start_errand(self, work: ThreadedWork[Any]) -> Work[Any]:
        """A thread of its own: a message may have to wait while later ones pass."""
        self._errands = [errand for errand in self._errands if not errand.is_done()]
        self._errands.append(work)
        work.start_thread("shoal-message")
        return work

    def _deliver(
        self, operation: Operation, peer: int, key: tuple[int, int], site: str, eager: bool
    ) -> Any:
        begin = time.perf_counter()
        where = self._where(operation, key[1], site)
        patience = self._patience(where, eager)
        patience.check()
        header = Header(operation.signature, operation.meta, self._expose_message(operation), site)
        is_sender = operation.kind == "send"
        meet = self._channel.offer if is_sender else self._channel.accept
        message = self._or_fail(meet, peer, key, encode(header), patience)
        theirs = decode(message.theirs)
        try:
            self._check_message(header, theirs, peer, is_sender)
        except MismatchError:
            message.abandon()
            raise
        waited = time.perf_counter() - begin
        payload = operation.prepare([theirs], self.rank)
        payload.wires = [theirs.wire]
        if payload.total:
            self._transport(self._send if is_sender else self._recv, payload, message, patience)
        self._or_fail(message.finish, patience)
        self._count(operation.kind, payload, begin, waited)
        return operation.result()

    def _expose_message(self, operation: Operation) -> bytes:
        """Like `_expose`, for a message."""
        return b""

    def _check_message(self, mine: Header, theirs: Header, peer: int, is_sender: bool) -> None:
        me, them = self.ranks[self.rank], self.ranks[peer]
        if is_sender:
            ops.check_message(mine, theirs, (me, them))
        else:
            ops.check_message(theirs, mine, (them, me))

    # The end ----------------------------------------------------------------------------

    def fail(self, reason: str, *, culprit: int | None = None) -> None:
        """Tells all ranks that this one cannot go on; ``culprit`` if another is to blame."""
        is_echo = culprit is not None
        rank = self._control.rank if culprit is None else culprit
        self._control.publish(Failure(rank, reason, time.monotonic_ns(), is_echo))

    def shutdown(self) -> None:
        """Finishes what was started, says goodbye and lets go of everything."""
        if self._state.is_closed:
            return
        self._state.is_closed = True
        groups = [group for group in self._state.groups if isinstance(group, ProcessBackend)]
        for group in groups:
            group._finish_started()
        note = self._state.farewells.note()
        if note:
            self._control.note(note)
        self._control.leave()
        if note:
            self._hear_farewells()
        for group in groups:
            group._close_transport()
        self._control.close()
        self._state.close_bootstrap()

    def _hear_farewells(self) -> None:
        """The others have been told that this rank leaves: none waits for it now."""
        control, farewells = self._control, self._state.farewells
        others = [rank for rank in range(control.size) if rank != control.rank]
        deadline = time.monotonic() + _LINGER_S
        while farewells.find(control.whereabouts, others) and control.failure() is None:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _finish_started(self) -> None:
        """Ends the threads. Their waits end by themselves, whatever the peers do."""
        self._queue.close()
        for errand in self._errands:
            errand.join()
        self._finish_transfers()
        self._await_others()

    def _finish_transfers(self) -> None:
        """Waits for transfers that nobody waits for."""

    def _settle(self) -> None:
        """One more transfer is over here."""
        self._num_settled += 1
        self._channel.settle(self._num_settled)

    def _await_others(self) -> None:
        """See [Note: leaving]."""
        deadline = time.monotonic() + _FAREWELL_S
        while late := self._channel.unsettled(self._num_settled):
            is_pointless = all(self._control.absence(rank) is not None for rank in late)
            if is_pointless or self._control.failure() is not None or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)


def _move_alone(payload: Payload) -> None:
    """A group of one: the result is the input."""
    source, target = payload.source, payload.target
    if source is not None and target is not None and target is not source:
        target.copy_(source)

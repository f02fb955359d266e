"""What the backends whose ranks are processes have in common: compare headers, then move data.

A subclass carries payloads (`_all_reduce` and so on, see `Payload`) and need not know that
ranks may call different operations, fail or be late: `Coordination` takes care of that.
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
from shoal.comm.control.plane import Channel, Control, Message
from shoal.comm.coordination import Coordination
from shoal.comm.operation import Operation, Payload
from shoal.comm.operation.base import Header, decode, encode
from shoal.comm.work import ThreadedWork, Work
from shoal.errors import MismatchError, ShoalError
from shoal.system.site import call_site

# Ranks that leave at the same time should still hear of each other.
_LINGER_S = 0.5
_POLL_S = 0.001


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
        self._coordination = Coordination(state, control, channel, self.name)
        state.allow_pickle = control.is_private
        self._messages: dict[tuple[str, int, int], int] = defaultdict(int)
        self._message_threads: list[ThreadedWork[Any]] = []
        self._stuck: MismatchError | None = None
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
        """Runs before headers are exchanged; the result is among the wires of others' payloads."""
        return b""

    def _check_tensor(self, tensor: Tensor) -> None:
        """Refuses tensors that the transport cannot carry."""

    def _close_transport(self) -> None:
        """Frees what the transport uses. Other ranks may still be at work."""

    # Collectives ------------------------------------------------------------------------

    def _collective(self, operation: Operation, async_op: bool) -> Any:
        if operation.source is not None:
            self._check_tensor(operation.source)
        coordination = self._coordination
        with coordination.lock:
            self._finish_pending()
            coordination.number += 1
            is_inline = not async_op and coordination.is_idle()
            task = partial(self._perform, operation, coordination.number, call_site(), is_inline)
            if is_inline:
                return task()
            work = coordination.start_queue().put(ThreadedWork(task, operation.signature))
        return work if async_op else work.wait()

    def _finish_pending(self) -> None:
        """Waits for operations that were shown to the others and are not carried out yet."""

    @property
    def is_in_step(self) -> bool:
        """Whether the ranks have called the same operations so far."""
        return self._coordination.is_in_step

    def _perform(self, operation: Operation, number: int, site: str, eager: bool) -> Any:
        begin = time.perf_counter()
        if self._stuck is not None:
            raise self._stuck
        patience = self._coordination.begin(operation.signature, number, site, eager=eager)
        try:
            headers = self._coordination.or_fail(
                self._exchange_headers, operation, number, site, patience
            )
        except MismatchError as error:
            if self.is_lane and not eager:  # others are queued behind it, which nobody else calls
                self._stuck = error
            raise
        waited = time.perf_counter() - begin
        payload = operation.prepare(headers, self.rank)
        payload.wires = [header.wire for header in headers]
        return self._carry_out(operation, payload, patience, (begin, waited))

    def _exchange_headers(
        self, operation: Operation, number: int, site: str, patience: Patience
    ) -> list[Header]:
        wire = self._expose(operation, number)
        mine = encode(Header(operation.signature, operation.meta, wire, site))
        shown = self._channel.exchange(number, mine, patience)
        return self._coordination.compare(operation, number, mine, shown)

    def _carry_out(
        self,
        operation: Operation,
        payload: Payload,
        patience: Patience,
        times: tuple[float, float],
    ) -> Any:
        if payload.total:
            with ops.writing(payload.target):
                self._coordination.or_fail(self._move, operation.kind, payload, patience)
            if self._is_through_at_once:
                self._coordination.settle()
        result = operation.result()
        self._count(operation.kind, payload, *times)
        return result

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
            raise self._coordination.explained(error) from error

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
        return self._start_message_thread(ThreadedWork(task, operation.signature))

    def _message_key(self, operation: Operation, peer: int, tag: int) -> tuple[int, int]:
        # Both sides count the messages of a tag, so the n-th send meets the n-th receive
        # in whatever order threads get to run.
        counter = (operation.kind, peer, tag)
        with self._message_lock:
            self._messages[counter] += 1
            return (tag, self._messages[counter])

    def _start_message_thread(self, work: ThreadedWork[Any]) -> Work[Any]:
        """A thread of its own: a message may have to wait while later ones pass."""
        self._message_threads = [each for each in self._message_threads if not each.is_done()]
        self._message_threads.append(work)
        work.start_thread("shoal-message")
        return work

    def _deliver(
        self, operation: Operation, peer: int, key: tuple[int, int], site: str, eager: bool
    ) -> Any:
        begin = time.perf_counter()
        patience = self._coordination.begin(operation.signature, key[1], site, eager=eager)
        header = Header(operation.signature, operation.meta, self._expose_message(operation), site)
        is_sender = operation.kind == "send"
        meet = self._channel.offer if is_sender else self._channel.accept
        message = self._coordination.or_fail(meet, peer, key, encode(header), patience)
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
        self._coordination.or_fail(message.finish, patience)
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
        self._coordination.fail(reason, culprit)

    def shutdown(self) -> None:
        """Finishes what was started, tells the others and frees everything."""
        if self._state.is_closed:
            return
        self._state.is_closed = True
        groups = [group for group in self._state.groups if isinstance(group, ProcessBackend)]
        for group in groups:
            group._finish_started()
        note = self._state.exit_records.note()
        if note:
            self._control.note(note)
        self._control.leave()
        if note:
            self._find_exit_records()
        for group in groups:
            group._close_transport()
        self._control.close()
        self._state.close_bootstrap()

    def _find_exit_records(self) -> None:
        """The others have been told that this rank leaves: none waits for it now."""
        control, records = self._control, self._state.exit_records
        others = [rank for rank in range(control.size) if rank != control.rank]
        deadline = time.monotonic() + _LINGER_S
        while records.find(control.whereabouts, others) and control.failure() is None:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _finish_started(self) -> None:
        """Ends the threads. Their waits end by themselves, whatever the peers do."""
        self._coordination.finish_queue()
        for work in self._message_threads:
            work.join()
        self._finish_transfers()
        self._coordination.await_others()

    def _finish_transfers(self) -> None:
        """Waits for transfers that nobody waits for."""


def _move_alone(payload: Payload) -> None:
    """A group of one: the result is the input."""
    source, target = payload.source, payload.target
    if source is not None and target is not None and target is not source:
        target.copy_(source)

"""What the backends whose ranks are processes have in common: compare headers, then move data.

A subclass carries payloads, by `_all_reduce`, `_reduce`, `_broadcast`, `_all_gather`, `_gather`,
`_scatter`, `_reduce_scatter`, `_all_to_all`, `_send` and `_recv`. It need not know that ranks may
call different operations, fail or be late: `Coordination` takes care of that.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shoal.comm import operation as ops
from shoal.comm.backend import Backend
from shoal.comm.control.deadlock.record import RankProgress
from shoal.comm.control.deadlock.watch import DeadlockWatch
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Control, Message
from shoal.comm.coordination import Coordination
from shoal.comm.operation import Operation, Payload
from shoal.comm.operation.base import Header, decode, encode
from shoal.comm.peer_tensors.between_processes import ProcessPeerTensors
from shoal.comm.peer_tensors.lending import LendingSource, PeerTensors
from shoal.comm.work import ThreadedWork, Work
from shoal.comm.world_state import WorldState
from shoal.errors import MismatchError
from shoal.system.public_call import origin
from shoal.system.rank_names import name_ranks

# Ranks that leave at the same time should still hear of each other.
_LINGER_S = 0.5
_POLL_S = 0.001


class ProcessBackend(Backend):
    """A backend over a control plane and a transport."""

    worthwhile_bytes = 4 << 20

    def __init__(
        self, state: WorldState, control: Control, channel: Channel, ranks: Sequence[int]
    ) -> None:
        """``ranks`` are the members' world ranks in group order."""
        super().__init__(state, ranks, list(ranks).index(control.rank))
        if not state.groups:
            control.deadlocks = DeadlockWatch(control, partial(_progress, state))
        self._control = control
        self._channel = channel
        self._coordination = Coordination(state, control, channel, self.name)
        state.secret = control.secret
        self._messages: dict[tuple[str, int, int], int] = defaultdict(int)
        self._message_threads: list[ThreadedWork[Any]] = []
        self._stuck: MismatchError | None = None
        self._message_lock = threading.Lock()  # a message need not wait for a collective
        state.groups.append(self)

    # What a transport implements --------------------------------------------------------

    def _mover(self, kind: str) -> Callable[..., None]:
        """What moves the payload of a kind of operation: tensors are flat, and not all empty.

        It is called with the payload and a `Patience`; for "send" and "recv" with the `Message`
        between the two.
        """
        if self.size == 1:
            return _move_alone
        move: Callable[..., None] = getattr(self, f"_{kind}")
        return move

    def _expose(self, operation: Operation) -> bytes:
        """Runs before headers are exchanged; the result is among the wires of others' payloads."""
        return b""

    def _expose_message(self, operation: Operation) -> bytes:
        """The same for a message."""
        return b""

    def _check_tensor(self, tensor: Tensor) -> None:
        """Refuses tensors that the transport cannot carry."""

    def _check_message_tensor(self, tensor: Tensor) -> None:
        """The same for messages."""
        self._check_tensor(tensor)

    def _begin(self, operation: Operation, number: int, site: str) -> Work[Any]:
        """Begins an operation that the queue's thread will carry out."""
        task = self._queued(operation, number, site)
        return self._coordination.start_queue().put(self._queued_work(operation, task))

    def _queued(self, operation: Operation, number: int, site: str) -> Callable[[], Any]:
        """What the queue's thread will call."""
        return partial(self._perform, operation, number, site, eager=False)

    def _queued_work(self, operation: Operation, task: Callable[[], Any]) -> ThreadedWork[Any]:
        """For the queue's thread: it comes after what the caller has put into a device's queue."""
        return ThreadedWork(task, operation.signature)

    def _message_work(self, operation: Operation, task: Callable[[], Any]) -> ThreadedWork[Any]:
        """The same for the thread of a message."""
        return ThreadedWork(task, operation.signature)

    def become_lane(self) -> None:
        """Users know a lane by what it is for."""
        super().become_lane()
        name = f"the traffic of a model or loader of {name_ranks(self.ranks)}"
        self._coordination.group_name = name

    def _finish_pending(self) -> None:
        """Waits for operations that were shown to the others and are not carried out yet."""

    def _finish_transfers(self) -> None:
        """Waits for transfers that nobody waits for."""

    def _close_transport(self) -> None:
        """Frees what the transport uses. Other ranks may still be at work."""

    # Collectives ------------------------------------------------------------------------

    @property
    def is_in_step(self) -> bool:
        """Whether the ranks have called the same operations so far."""
        return self._coordination.is_in_step

    def run(self, operation: Operation, *, async_op: bool = False) -> Any:
        """Carries it out here if nobody else is at work, else in the queue's thread."""
        self._check_open()
        if operation.source is not None:
            self._check_tensor(operation.source)
        coordination = self._coordination
        coordination.enter()
        try:
            self._finish_pending()
            coordination.number += 1
            is_inline = not async_op and coordination.is_idle()
            site = origin(operation.signature, coordination.called)
            if is_inline:
                return self._perform(operation, coordination.number, site, eager=True)
            work = self._begin(operation, coordination.number, site)
        finally:
            coordination.leave()
        return work if async_op else work.wait()

    def _check_stuck(self) -> None:
        """Raises where operations of all ranks cannot go on any more."""
        stuck = self._stuck or self._state.mismatch
        if stuck is not None:
            raise stuck

    def _perform(self, operation: Operation, number: int, site: str, *, eager: bool) -> Any:
        begin, coordination = time.perf_counter(), self._coordination
        self._check_stuck()
        patience = coordination.begin(operation.signature, number, site, eager=eager)
        wire = self._expose(operation)
        mine = encode(Header(operation.signature, operation.meta, wire, site))
        shown = coordination.or_fail(self._channel.exchange, number, mine, patience)
        times = (begin, time.perf_counter() - begin)
        try:
            payload = coordination.prepare(operation, number, mine, shown)
        except MismatchError as error:
            if self.is_lane and not eager:  # others are queued behind it, which nobody else calls
                self._stuck = error
            raise
        return coordination.carry_out(operation, payload, self._mover, patience, times)

    # Messages ---------------------------------------------------------------------------

    def _message(self, operation: Operation, peer: int, tag: int, async_op: bool) -> Any:
        if operation.source is not None:
            self._check_message_tensor(operation.source)
        key = self._message_key(operation, peer, tag)
        site = origin(operation.signature, self._coordination.called)
        deliver = partial(self._deliver, operation, peer, key, site, not async_op)
        if not async_op:
            return deliver()
        return self._start_message_thread(self._message_work(operation, deliver))

    def _message_key(self, operation: Operation, peer: int, tag: int) -> tuple[int, int]:
        # Both sides count the messages of a tag, so the n-th send meets the n-th receive
        # in whatever order threads get to run.
        counter = (operation.kind, peer, tag)
        with self._message_lock:
            self._messages[counter] += 1
            return (tag, self._messages[counter])

    def _awaited(self, operation: Operation, key: tuple[int, int]) -> tuple[str, int, int, int]:
        """What a message waits for: the other half."""
        return (operation.kind, self._coordination.group_id, key[1], key[0])

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
        patience.awaited = self._awaited(operation, key)
        self._coordination.or_fail(self._prepare_message, operation.kind, peer, patience)
        header = Header(operation.signature, operation.meta, self._expose_message(operation), site)
        message, number = self._meet(header, operation.kind, peer, key, patience)
        theirs = decode(message.theirs)
        try:
            self._check_message(header, theirs, peer, operation.kind == "send")
            waited = time.perf_counter() - begin
            payload = operation.prepare([theirs], self.rank)
            payload.wires = [number or theirs.wire]
            if payload.total:
                move = self._mover(operation.kind)
                self._coordination.transport(move, payload, message, patience)
        except MismatchError:
            message.abandon()
            raise
        finally:
            self._end_message(operation.kind, peer, number or theirs.wire)
        self._coordination.or_fail(message.finish, patience)
        self._coordination.count(operation.kind, payload.num_bytes, begin, waited)
        return operation.result()

    def _meet(
        self, header: Header, kind: str, peer: int, key: tuple[int, int], patience: Patience
    ) -> tuple[Message, bytes]:
        """The message, known to both; a receiver of some transports numbers it."""
        coordination, channel, number = self._coordination, self._channel, b""
        if kind == "send":
            return coordination.or_fail(channel.offer, peer, key, encode(header), patience), b""

        def answer() -> bytes:
            nonlocal number
            number = self._number_message(peer)
            return encode(header._replace(wire=number) if number else header)

        try:
            return coordination.or_fail(channel.accept, peer, key, answer, patience), number
        except BaseException:
            self._end_message(kind, peer, number)
            raise

    def _prepare_message(self, kind: str, peer: int, patience: Patience) -> None:
        """Before a message is shown to the peer."""

    def _number_message(self, peer: int) -> bytes:
        """What a receiver tells the sender of a message when they have met, if anything."""
        return b""

    def _end_message(self, kind: str, peer: int, number: bytes) -> None:
        """The payload of a message that they had numbered is on its way, or will never be."""

    def _check_message(self, mine: Header, theirs: Header, peer: int, is_sender: bool) -> None:
        me, them = self.ranks[self.rank], self.ranks[peer]
        if is_sender:
            ops.check_message(mine, theirs, (me, them))
        else:
            ops.check_message(theirs, mine, (them, me))

    def lend(self, source: LendingSource) -> PeerTensors:
        """Served by a thread of this rank, over sockets."""
        self._check_open()
        return ProcessPeerTensors(self, self._state, self._control, source)

    # The end ----------------------------------------------------------------------------

    def fail(self, reason: str, *, culprit: int | None = None) -> None:
        """Tells all ranks that this one cannot go on; ``culprit`` if another is to blame."""
        if not self._state.is_forked:
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
        self._control.leave(self._state.parting)
        if note:
            self._find_exit_records()
        self._state.end_lendings()
        for group in groups:
            group._close_transport()
        self._control.close()
        self._state.close_bootstrap()

    def abandon(self) -> None:
        """Gives the world up: nothing is compared, and nobody who is gone is waited for."""
        if self._state.is_closed:
            return
        self._state.is_closed = True
        groups = [group for group in self._state.groups if isinstance(group, ProcessBackend)]
        for group in groups:
            group._finish_started()
        self._control.leave("going on to another world")
        self._state.end_lendings()
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


def _progress(state: WorldState) -> RankProgress:
    """How far this rank has got in all groups of a world."""
    groups: dict[int, tuple[int, int]] = {}
    messages: dict[tuple[int, str, int, int], int] = {}
    for group in list(state.groups):
        assert isinstance(group, ProcessBackend)
        coordination = group._coordination
        groups[coordination.group_id] = (coordination.number, coordination.num_settled)
        for (kind, peer, tag), number in list(group._messages.items()):
            messages[coordination.group_id, kind, group.ranks[peer], tag] = number
    return RankProgress(groups, messages)


def _move_alone(payload: Payload, patience: Patience) -> None:
    """A group of one: the result is the input."""
    source, target = payload.source, payload.target
    if source is not None and target is not None and target is not source:
        target.copy_(source)


def by_host_memory(move: Callable[..., None]) -> Callable[..., None]:
    """Moves payloads on a GPU by way of host memory."""

    def move_staged(payload: Payload, *args: Any) -> None:
        staged = payload.on_host()
        move(staged, *args)
        if payload.target is not None and staged.target is not None and staged is not payload:
            payload.target.copy_(staged.target)

    return move_staged

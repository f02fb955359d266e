"""`MPIBackend`: ranks that `mpiexec` started, on one host or many, over mpi4py.

[Note: only messages]
Everything is made of MPI's non-blocking messages on one communicator, and each group has a tag. A
group then costs nothing and making one cannot hang. MPI's own reductions are not used: theirs know
no 16-bit floats, lose NaN in min and max, and sum in an order that depends on the library. Ours
reduce in rank order, so every rank, run and backend gets the same bits. They are no slower either:
between two processes of a host, 64 MiB take 50 ms, and 140 with Open MPI's `Iallreduce`.

[Note: slices and windows]
A large reduction is cut into a slice for each rank, which receives that slice from everybody and
reduces it. It works through the slices a window at a time, so that little memory is needed; the
results of one window travel together with the inputs of the next.

[Note: worlds of one communicator]
Where ranks may be lost, each world after a loss has the first world's communicator, which messages
between the living still pass, and tags of its own. So nothing has to be made by all ranks that are
left, in which MPI could hang or fail once more, and no message of an old world is taken for one of
the new. Open MPI must have been started with `--with-ft ulfm`: without, the loss of one ends all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.connect import connect
from shoal.comm.control.page.control import PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control, Message
from shoal.comm.mpi import runtime
from shoal.comm.mpi.bootstrap import BOOTSTRAP_TAG
from shoal.comm.operation import Payload
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.comm.operation.reduction import reduce_into
from shoal.comm.process_backend import ProcessBackend, by_host_memory
from shoal.comm.world_state import WorldState
from shoal.errors import BackendUnavailableError, ShoalError, TransportError
from shoal.system.deadline import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

    Piece = tuple[int, Tensor]  # what goes to a rank of the group, or comes from it

# MPI guarantees tags up to 32767. Messages use their tickets, each group's collectives one more.
_FIRST_GROUP_TAG = 1024
_TAGS_OF_WORLD = BOOTSTRAP_TAG + 1
# A count is an int in MPI 3, so longer tensors travel as several messages.
_LONGEST_BYTES = 1 << 30
# Up to here all ranks send everything to those that need it: more bytes, but fewer rounds.
_SMALL_BYTES = 1 << 20
_WINDOW_BYTES = 2 << 20
# A rank that left, or died, may have left its last bytes on the way.
_LAST_BYTES_S = 0.2


class Passage(NamedTuple):
    """How messages of one world go.

    Attributes:
        comm: A communicator of shoal's own.
        ranks: The ranks of the world, as they are in it.
        first_tag: Tags of this world begin there; see [Note: worlds of one communicator].
    """

    comm: MPI.Comm
    ranks: Sequence[int]
    first_tag: int = 0


def connect_mpi(bootstrap: Bootstrap, state: WorldState) -> MPIBackend:
    """The world of an MPI job; its ranks are MPI's."""
    mpi = runtime.load(bootstrap.timeout)
    if bootstrap.is_elastic:
        ranks = bootstrap.all_gather(str(mpi.COMM_WORLD.rank).encode())
    else:
        _check_position(mpi.COMM_WORLD, bootstrap)
    control = connect(bootstrap)
    if isinstance(control, PageControl):
        runtime.watch(control.pids)
    try:
        if bootstrap.is_elastic:
            passage = _elastic_passage(mpi, [int(rank) for rank in ranks], bootstrap, control)
        else:
            comm = _duplicate(mpi.COMM_WORLD, control, state.timeout)
            passage = Passage(comm, range(bootstrap.size))
    except BaseException:
        control.close()
        raise
    return MPIBackend(state, control, range(bootstrap.size), passage)


def _elastic_passage(
    mpi: ModuleType, ranks: Sequence[int], bootstrap: Bootstrap, control: Control
) -> Passage:
    """All worlds of a run have one communicator; see [Note: worlds of one communicator]."""
    if len(set(ranks)) < len(ranks):
        raise BackendUnavailableError(
            "backend='mpi' needs ranks that mpiexec started, and to MPI each of these is alone: "
            "start the run with shoal launch --elastic --backend mpi"
        )
    if runtime.shared_comm() is None and len(ranks) < mpi.COMM_WORLD.size:
        raise TransportError(
            f"{len(ranks)} ranks of an MPI job of {mpi.COMM_WORLD.size} cannot begin an elastic "
            "run: over MPI all of them begin, and ranks may go afterwards"
        )
    if runtime.shared_comm() is None:
        runtime.share_comm(_duplicate(mpi.COMM_WORLD, control, bootstrap.timeout))
    comm = runtime.shared_comm()
    assert comm is not None
    first_tag = bootstrap.generation * _TAGS_OF_WORLD
    if first_tag + _TAGS_OF_WORLD > (comm.Get_attr(mpi.TAG_UB) or 0):
        raise TransportError("this MPI has no tags left for another world of the run")
    return Passage(comm, ranks, first_tag)


def _check_position(world: MPI.Comm, bootstrap: Bootstrap) -> None:
    if (world.rank, world.size) != (bootstrap.rank, bootstrap.size):
        raise BackendUnavailableError(
            f"backend='mpi' needs ranks that mpiexec started: this process is rank "
            f"{bootstrap.rank} of {bootstrap.size}, but to MPI it is rank {world.rank} of "
            f"{world.size}. Start it with mpiexec (of the MPI that mpi4py uses), or with "
            "shoal launch --backend mpi."
        )


def _duplicate(world: MPI.Comm, control: Control, timeout: float) -> MPI.Comm:
    """A communicator of our own, so that no message of the user's or of another world is ours."""
    ranks = range(world.size)
    patience = Patience(control, lambda: "the start of the mpi backend", ranks, timeout)
    others = [rank for rank in ranks if rank != world.rank]
    with runtime.LOCK:
        comm, request = world.Idup()
    try:
        while not _is_done(request):
            patience.pause(lambda: [] if _is_done(request) else others)
    except BaseException:
        runtime.keep(comm, request)
        raise
    return comm


def _is_done(request: MPI.Request) -> bool:
    with runtime.LOCK:
        return request.Test()


class MPIBackend(ProcessBackend):
    """Collectives between processes that `mpiexec` started.

    CUDA tensors go through host memory, unless ``SHOAL_MPI_CUDA_AWARE=1`` says that MPI takes them.

    Example:
        >>> import shoal, torch
        >>> def total():
        ...     return shoal.world().all_reduce(torch.ones(1)).item()
        >>> shoal.run(total, ranks=2, backend="mpi")
        [2.0, 2.0]
    """

    name = "mpi"

    def __init__(
        self,
        state: WorldState,
        control: Control,
        ranks: Sequence[int],
        passage: Passage,
        group_id: int = 0,
    ) -> None:
        """``passage`` is the world's and shared by its groups; ``group_id`` tells them apart."""
        super().__init__(state, control, control.channel(group_id, ranks), ranks)
        self._comm, self._passage = passage.comm, passage
        self._tag = _FIRST_GROUP_TAG + group_id
        self._owns_comm = group_id == 0 and passage.first_tag == 0
        self._as_buffer = runtime.load(state.timeout).buffer.fromaddress
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._scratch: Tensor | None = None
        self._is_broken = False
        if self._tag >= BOOTSTRAP_TAG:
            raise TransportError(
                f"this world has made {group_id} groups; make groups once, keep them"
            )

    def _make_group(self, members: Sequence[int], group_id: int) -> MPIBackend:
        ranks = [self.ranks[member] for member in members]
        return MPIBackend(self._state, self._control, ranks, self._passage, group_id)

    def abandon(self) -> None:
        """Gives the world up; MPI cannot be ended by all ranks together any more."""
        runtime.mark_failed()
        super().abandon()

    def _close_transport(self) -> None:
        if self._control.failure() is not None:
            runtime.mark_failed()
        elif self._owns_comm and not self._is_broken:
            with runtime.LOCK:
                self._comm.Free()

    # Moving pieces ----------------------------------------------------------------------

    def _exchange(
        self, receives: Sequence[Piece], sends: Sequence[Piece], patience: Patience
    ) -> None:
        """Moves all pieces of a step; between two ranks, both list them in the same order."""
        if self._is_broken:
            raise TransportError("an earlier operation of this group was given up half way")
        try:
            self._transfer(receives, sends, self._tag, patience)
        except BaseException:
            self._is_broken = True
            raise

    def _transfer(
        self, receives: Sequence[Piece], sends: Sequence[Piece], tag: int, patience: Patience
    ) -> None:
        requests: list[tuple[int, MPI.Request]] = []
        try:
            with runtime.LOCK:
                self._start_requests(self._comm.Irecv, receives, tag, requests)
                self._start_requests(self._comm.Isend, sends, tag, requests)
            self._await(requests, patience)
        except BaseException:
            runtime.keep(requests, receives, sends)
            raise

    def _start_requests(
        self,
        start: Callable[..., MPI.Request],
        pieces: Sequence[Piece],
        tag: int,
        requests: list[tuple[int, MPI.Request]],
    ) -> None:
        for rank, tensor in pieces:
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)  # MPI knows nothing of streams
            peer = self.ranks[rank]
            place = self._passage.ranks[peer]
            for buffer in self._buffers(tensor):
                request = start(buffer, place, self._passage.first_tag + tag)
                requests.append((peer, request))

    def _buffers(self, tensor: Tensor) -> list[MPI.buffer]:
        """The tensor's memory as one or more messages; none if it is empty."""
        address, num_bytes = tensor.data_ptr(), tensor.nbytes
        if 0 < num_bytes <= _LONGEST_BYTES:
            return [self._as_buffer(address, num_bytes)]
        return [
            self._as_buffer(address + start, min(_LONGEST_BYTES, num_bytes - start))
            for start in range(0, num_bytes, _LONGEST_BYTES)
        ]

    def _await(self, requests: Sequence[tuple[int, MPI.Request]], patience: Patience) -> None:
        def missing() -> list[int]:
            return sorted({peer for peer, request in requests if not _is_done(request)})

        try:
            for _, request in requests:
                if not _is_done(request):
                    while not _is_done(request):
                        os.sched_yield()  # a test costs as much, and the peer may need the core
                        patience.pause(missing)
                    patience.made_progress()
        except ShoalError:
            if not wait_until(lambda: not missing(), _LAST_BYTES_S, poll_s=1e-3):
                raise

    def _pieces(self, tensor: Tensor, counts: Sequence[int]) -> list[Piece]:
        """The others' parts of a tensor that has a part for each rank."""
        parts = tensor.split(list(counts))
        return [(rank, parts[rank]) for rank in self._others]

    # Reductions -------------------------------------------------------------------------

    def _all_reduce(self, payload: Payload, patience: Patience) -> None:
        self._reduce_for(payload, range(self.size), patience)

    def _reduce(self, payload: Payload, patience: Patience) -> None:
        self._reduce_for(payload, [payload.root], patience)

    def _reduce_for(self, payload: Payload, receivers: Sequence[int], patience: Patience) -> None:
        if payload.given.nbytes <= _SMALL_BYTES // (self.size - 1):
            self._reduce_whole(payload, payload.given, receivers, patience)
        else:
            self._reduce_slices(payload, payload.given, receivers, patience)

    def _reduce_whole(
        self, payload: Payload, whole: Tensor, receivers: Sequence[int], patience: Patience
    ) -> None:
        """Each receiver gets everything and reduces for itself."""
        inputs = self._inputs(whole) if self.rank in receivers else {}
        receives = list(inputs.items())
        sends = [(rank, whole) for rank in receivers if rank != self.rank]
        self._exchange(receives, sends, patience)
        if self.rank in receivers:
            self._reduce_inputs(payload, inputs, whole, whole)

    def _reduce_slices(
        self, payload: Payload, whole: Tensor, receivers: Sequence[int], patience: Patience
    ) -> None:
        """See [Note: slices and windows]. Ranks that receive nothing keep their tensor."""
        results: tuple[list[Piece], list[Piece]] = ([], [])
        for parts in _windows(whole, split_sizes(whole.numel(), self.size)):
            mine = parts[self.rank]
            inputs = self._inputs(mine)
            sends = [(rank, parts[rank]) for rank in self._others]
            self._exchange([*results[0], *inputs.items()], [*results[1], *sends], patience)
            # The last index: windows only get shorter, so the next one's inputs end before it.
            out = mine if self.rank in receivers else self._room(mine, self.size - 1)
            self._reduce_inputs(payload, inputs, mine, out)
            arriving = sends if self.rank in receivers else []
            results = (arriving, [(rank, out) for rank in receivers if rank != self.rank])
        self._exchange(*results, patience)

    def _reduce_scatter(self, payload: Payload, patience: Patience) -> None:
        done = 0
        for parts in _windows(payload.given, payload.counts):
            mine = parts[self.rank]
            inputs = self._inputs(mine)
            sends = [(rank, parts[rank]) for rank in self._others]
            self._exchange(list(inputs.items()), sends, patience)
            out = payload.gotten[done : done + mine.numel()]
            self._reduce_inputs(payload, inputs, mine, out)
            done += mine.numel()

    def _inputs(self, like: Tensor) -> dict[int, Tensor]:
        """Room for what each of the others contributes to one reduction."""
        return {rank: self._room(like, index) for index, rank in enumerate(self._others)}

    def _room(self, like: Tensor, index: int) -> Tensor:
        """One of as many buffers as there are ranks, in memory that later operations use again."""
        stride = -(-like.nbytes // 64) * 64
        scratch = self._scratch
        if scratch is None or scratch.device != like.device or scratch.numel() < stride * self.size:
            scratch = torch.empty(stride * self.size, dtype=torch.uint8, device=like.device)
            self._scratch = scratch
        return scratch[index * stride : index * stride + like.nbytes].view(like.dtype)

    def _reduce_inputs(
        self, payload: Payload, inputs: dict[int, Tensor], mine: Tensor, out: Tensor
    ) -> None:
        if out.numel():
            in_order = [inputs.get(rank, mine) for rank in range(self.size)]
            reduce_into(payload.op, in_order, out)

    # Data movement ----------------------------------------------------------------------

    def _broadcast(self, payload: Payload, patience: Patience) -> None:
        whole = payload.given
        if self.size == 2 or whole.nbytes <= _SMALL_BYTES:
            self._broadcast_whole(whole, payload.root, patience)
        else:
            self._broadcast_slices(whole, payload.root, patience)

    def _broadcast_whole(self, whole: Tensor, root: int, patience: Patience) -> None:
        """Down a binomial tree: a rank gets it from the one without its lowest bit."""
        position = (self.rank - root) % self.size
        lowest = position & -position or 1 << (self.size - 1).bit_length()
        if position:
            self._exchange([((position - lowest + root) % self.size, whole)], [], patience)
        bits = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
        children = [position + bit for bit in bits if position + bit < self.size]
        self._exchange([], [((child + root) % self.size, whole) for child in children], patience)

    def _broadcast_slices(self, whole: Tensor, root: int, patience: Patience) -> None:
        """The root hands out slices, which the others hand on: nobody sends it all to all."""
        parts = whole.split(split_sizes(whole.numel(), self.size))
        slices = [(rank, parts[rank]) for rank in self._others]
        if self.rank == root:
            self._exchange([], slices, patience)
            self._exchange([], [(rank, parts[root]) for rank in self._others], patience)
        else:
            mine = parts[self.rank]
            self._exchange([(root, mine)], [], patience)
            sends = [(rank, mine) for rank in self._others if rank != root]
            self._exchange(slices, sends, patience)

    def _all_gather(self, payload: Payload, patience: Patience) -> None:
        _own_part(payload.gotten, payload.counts, self.rank).copy_(payload.given)
        receives = self._pieces(payload.gotten, payload.counts)
        self._exchange(receives, [(rank, payload.given) for rank in self._others], patience)

    def _gather(self, payload: Payload, patience: Patience) -> None:
        if payload.target is None:
            self._exchange([], [(payload.root, payload.given)], patience)
            return
        _own_part(payload.target, payload.counts, self.rank).copy_(payload.given)
        self._exchange(self._pieces(payload.target, payload.counts), [], patience)

    def _scatter(self, payload: Payload, patience: Patience) -> None:
        if payload.source is None:
            self._exchange([(payload.root, payload.gotten)], [], patience)
            return
        payload.gotten.copy_(_own_part(payload.source, payload.counts, self.rank))
        self._exchange([], self._pieces(payload.source, payload.counts), patience)

    def _all_to_all(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.given, payload.gotten
        own = _own_part(source, payload.counts, self.rank)
        _own_part(target, payload.arriving, self.rank).copy_(own)
        receives = self._pieces(target, payload.arriving)
        self._exchange(receives, self._pieces(source, payload.counts), patience)

    def _send(self, payload: Payload, message: Message, patience: Patience) -> None:
        assert message.ticket < _FIRST_GROUP_TAG
        self._transfer([], [(payload.root, payload.given)], message.ticket, patience)

    def _recv(self, payload: Payload, message: Message, patience: Patience) -> None:
        assert message.ticket < _FIRST_GROUP_TAG
        self._transfer([(payload.root, payload.gotten)], [], message.ticket, patience)

    def _mover(self, kind: str) -> Callable[..., None]:
        move = super()._mover(kind)
        takes_cuda = os.environ.get("SHOAL_MPI_CUDA_AWARE") == "1"
        return move if takes_cuda else by_host_memory(move)


def _own_part(tensor: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    start = sum(counts[:rank])
    return tensor[start : start + counts[rank]]


def _windows(tensor: Tensor, counts: Sequence[int]) -> Iterator[list[Tensor]]:
    """Goes through all parts of a tensor at once, a window at a time; short parts end early."""
    starts = offsets(counts)
    width = max(1, _WINDOW_BYTES // tensor.itemsize)
    for begin in range(0, max(counts), width):
        yield [
            tensor[start + min(begin, count) : start + min(begin + width, count)]
            for start, count in zip(starts, counts, strict=False)
        ]

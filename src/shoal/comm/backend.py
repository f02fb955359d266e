"""The interface of every backend: what users and strategies call.

[Note: one convention]
Operations whose result has the shape of the input work in place: all_reduce, reduce,
broadcast, recv. The others write into ``out``, or into a new tensor where none is given:
all_gather, gather, scatter, reduce_scatter, all_to_all. All return the result, and None on
ranks that have none. Inputs that are not the result are left as they are.

Tensors are cut and joined along their first dimension ("rows"). A length that does not
divide by the number of ranks gives the first ranks one row more; ``sizes`` overrides that.
With ``async_op=True`` a `Work` comes back at once, and its ``wait()`` returns the result.
Sends complete when the message was received, on every backend alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from shoal.comm import operation as ops
from shoal.comm.accounting import Account, StatisticsSnapshot
from shoal.comm.control.exit_records import Recorded
from shoal.comm.lanes import Lanes
from shoal.comm.objects import encoding
from shoal.comm.objects.seals import COLLECTIVES, Seals, message_stream
from shoal.comm.operation.reduction import ReduceOp
from shoal.comm.peer_tensors.lending import LendingSource, PeerTensors
from shoal.comm.work import Work
from shoal.comm.world_state import WorldState, closed_error
from shoal.errors import ShoalError
from shoal.torch_support.memory import PrivateView, as_bytes

RunCached = Callable[[str, object, Tensor, Tensor, Callable[[], ops.Operation]], Tensor | None]
"""A fast path for calls that are made again and again with other data.

It gets the kind of a collective, its reduction or root, input and output (perhaps the same tensor),
and a function that makes the operation. It returns the result, or None if it did nothing.
"""


class Backend(ABC):
    """A group of ranks that can exchange tensors and objects.

    Example:
        >>> import shoal, torch
        >>> def total(value):
        ...     backend = shoal.world().backend
        ...     return backend.all_reduce(torch.tensor([value + backend.rank])).item()
        >>> shoal.run(total, ranks=3, backend="memory", args=(10,))
        [33, 33, 33]
    """

    name: ClassVar[str]
    """What users call this backend: "memory", "shm", "gloo", "nccl" or "mpi"."""
    shares_memory: ClassVar[bool] = False
    """Whether `reach` gives access to the other ranks' memory."""
    worthwhile_bytes: ClassVar[int] = 1 << 20
    """How long a message should be, so that what it costs to begin with hardly matters."""

    def __init__(self, state: WorldState, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are the members' world ranks in order, ``rank`` is this one's index."""
        self._state = state
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.is_lane = False
        """Whether it is for one owner's traffic, which does not go on after a mismatch."""
        self._lanes_lent = Lanes()
        self._run_cached: RunCached | None = None
        self._group_id = 0

    @property
    def world_size(self) -> int:
        """The number of ranks of this group; the same as ``size``."""
        return self.size

    @property
    def is_in_step(self) -> bool:
        """Whether the ranks of this group are known to have called the same operations so far."""
        return True

    @property
    def timeout(self) -> float:
        """Seconds an alive but late rank is waited for."""
        return self._state.timeout

    @property
    def device(self) -> torch.device:
        """Where tensors live that this backend makes on its own."""
        return torch.device("cpu")

    def carries(self, tensor: Tensor) -> bool:
        """Whether collectives take a tensor from where it is; messages and objects take any."""
        return True

    # What a kind of backend implements ------------------------------------------------

    @abstractmethod
    def run(self, operation: ops.Operation, *, async_op: bool = False) -> Any:
        """Carries out an operation of all ranks; returns its result, or a `Work`.

        For callers that want to know more of it than the result.
        """

    @abstractmethod
    def _message(self, operation: ops.Operation, peer: int, tag: int, async_op: bool) -> Any:
        """Carries out this rank's half of a message; returns its result, or a `Work`."""

    @abstractmethod
    def _make_group(self, members: Sequence[int], group_id: int) -> Backend:
        """The group of some ranks of this one; ``group_id`` is a number new to all of them."""

    @abstractmethod
    def lend(self, source: LendingSource) -> PeerTensors:
        """Lets the others read tensors of this rank at any time; all ranks call it.

        See [Note: lent tensors].
        """

    @abstractmethod
    def fail(self, reason: str, *, culprit: int | None = None) -> None:
        """Tells all ranks that this one cannot go on; ``culprit`` if another is to blame."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leaves the world and frees everything. Twice is fine."""

    def empty(
        self, numel: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """A flat tensor in memory that this transport reaches without a copy."""
        return torch.empty(numel, dtype=dtype, device=device or self.device)

    def reach(self, memory: Tensor) -> list[Tensor] | None:
        """Every rank's ``memory``, to read and write directly; all ranks call it.

        None where ranks do not share memory. ``memory`` has to come from `empty`. The caller must
        make sure that no rank reads what another writes: ranks are not synchronized here.
        """
        return None

    def share(self, num_bytes: int, owner: int) -> tuple[Tensor, PrivateView] | None:
        """One memory for all ranks, and this rank's own view of it; all ranks call it.

        None where ranks do not share memory. It counts as the owner's. See [Note: private views].
        """
        return None

    # Collectives ----------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, async_op: bool = False
    ) -> Any:
        """Reduces ``tensor`` over all ranks, in place on every rank."""

        def make() -> ops.Operation:
            return ops.AllReduce(tensor, ReduceOp.parse(op))

        return self._run_often("all_reduce", op, tensor, tensor, make, async_op)

    def reduce(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        root: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Reduces over all ranks into the root's ``tensor``; None comes back elsewhere."""
        self._check_rank("root", root)
        is_root = root == self.rank
        return self.run(ops.Reduce(tensor, ReduceOp.parse(op), root, is_root), async_op=async_op)

    def broadcast(
        self, tensor: Tensor | None = None, *, root: int = 0, async_op: bool = False
    ) -> Any:
        """Fills ``tensor`` with the root's; without one, a new tensor comes back."""
        self._check_rank("root", root)

        def make() -> ops.Operation:
            return ops.Broadcast(tensor, root, root == self.rank, self.device)

        return self._run_often("broadcast", root, tensor, tensor, make, async_op)

    def all_gather(
        self, tensor: Tensor, *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """Joins the rows of all ranks, on every rank. Ranks may give different numbers."""
        make = partial(ops.AllGather, tensor, out)
        return self._run_often("all_gather", None, tensor, out, make, async_op)

    def gather(
        self,
        tensor: Tensor,
        *,
        root: int = 0,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """Joins the rows of all ranks on the root; None comes back elsewhere."""
        self._check_rank("root", root)
        return self.run(ops.Gather(tensor, out, root, root == self.rank), async_op=async_op)

    def scatter(
        self,
        tensor: Tensor | None = None,
        *,
        root: int = 0,
        out: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Hands each rank its rows of the root's ``tensor``."""
        self._check_rank("root", root)
        operation = ops.Scatter(tensor, out, sizes, root, self.device, (self.rank, self.size))
        return self.run(operation, async_op=async_op)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces over all ranks; each rank keeps its own rows of the result."""

        def make() -> ops.Operation:
            position = (self.rank, self.size)
            return ops.ReduceScatter(tensor, ReduceOp.parse(op), out, sizes, position)

        if sizes is not None:
            return self.run(make(), async_op=async_op)
        return self._run_often("reduce_scatter", op, tensor, out, make, async_op)

    def all_to_all(
        self,
        tensor: Tensor,
        *,
        out: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends part i of ``tensor`` to rank i; returns what arrived, by sender."""
        operation = ops.AllToAll(tensor, out, sizes, (self.rank, self.size))
        return self.run(operation, async_op=async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        """Returns once every rank has arrived."""
        return self.run(ops.Barrier(), async_op=async_op)

    # Messages -------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Sends to one rank; done when it was received. Messages of one tag keep their order."""
        self._check_peer("dst", dst)
        self._check_open()
        return self._message(ops.Send(tensor, dst, tag), dst, check_tag(tag), async_op)

    def start_send(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Sends in the background, without a thread where ranks share memory."""
        work: Work[None] = self.send(tensor, dst, tag, async_op=True)
        return work

    def recv(
        self, tensor: Tensor | None = None, *, src: int, tag: int = 0, async_op: bool = False
    ) -> Any:
        """Receives from one rank into ``tensor``; without one, a new tensor comes back."""
        self._check_peer("src", src)
        self._check_open()
        operation = ops.Receive(tensor, src, tag, self.device)
        return self._message(operation, src, check_tag(tag), async_op)

    # Objects --------------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's object, by rank, on every rank."""
        operation = ops.AllGather(self._encode(value), None)
        operation.signature = "all_gather_object()"
        return self._decode_parts(self.run(operation), operation.rows)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """Every rank's object, by rank, on the root; None elsewhere."""
        self._check_rank("root", root)
        operation = ops.Gather(self._encode(value), None, root, root == self.rank)
        operation.signature = f"gather_object(root={root})"
        joined = self.run(operation)
        return None if joined is None else self._decode_parts(joined, operation.rows)

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """The root's object on every rank; the others' argument does not matter."""
        self._check_rank("root", root)
        is_root = root == self.rank
        data = self._encode(value) if is_root else None
        operation = ops.Broadcast(data, root, is_root, self.device)
        operation.signature = f"broadcast_object(root={root})"
        data = self.run(operation)
        return value if is_root else self._decode(data, root)

    def scatter_object(self, values: Sequence[Any] | None = None, *, root: int = 0) -> Any:
        """One object of the root's list for each rank."""
        self._check_rank("root", root)
        data, sizes = None, None
        if root == self.rank:
            if values is None or len(values) != self.size:
                raise ValueError(f"scatter_object needs a list of {self.size} objects on the root")
            parts = [self._encode(value) for value in values]
            data, sizes = torch.cat(parts), [part.numel() for part in parts]
        position = (self.rank, self.size)
        operation = ops.Scatter(data, None, sizes, root, self.device, position)
        operation.signature = f"scatter_object(root={root})"
        return self._decode(self.run(operation), root)

    def all_to_all_object(self, values: Sequence[Any]) -> list[Any]:
        """Sends object i to rank i; returns what arrived, by sender."""
        if len(values) != self.size:
            raise ValueError(f"all_to_all_object needs {self.size} objects; got {len(values)}")
        parts = [self._encode(value) for value in values]
        sizes = [part.numel() for part in parts]
        operation = ops.AllToAll(torch.cat(parts), None, sizes, (self.rank, self.size))
        operation.signature = "all_to_all_object()"
        return self._decode_parts(self.run(operation), operation.rows)

    def send_object(self, value: Any, dst: int, tag: int = 0) -> None:
        """Sends an object to one rank."""
        self.send(self.encode_message(value, dst, tag), dst, tag)

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """Receives an object from one rank."""
        return self._decode(self.recv(src=src, tag=tag), src, message_stream(src, self.rank, tag))

    def encode_message(self, value: Any, dst: int, tag: int = 0) -> Tensor:
        """An object as what `send` can carry for `recv_object` of a rank."""
        return self._encode(value, message_stream(self.rank, dst, tag))

    def _encode(self, value: Any, stream: str = COLLECTIVES) -> Tensor:
        sealed = self._seals.seal(encoding.encode(value), self.rank, stream)
        return as_bytes(bytearray(sealed)).to(self.device)

    def _decode(self, data: Tensor, sender: int, stream: str = COLLECTIVES) -> Any:
        raw, is_proven = self._seals.open(data.cpu().numpy().tobytes(), sender, stream)
        return encoding.decode(raw, allow_pickle=is_proven)

    def _decode_parts(self, joined: Tensor, sizes: Sequence[int]) -> list[Any]:
        parts = joined.split(list(sizes))
        return [self._decode(part, sender) for sender, part in enumerate(parts)]

    @cached_property
    def _seals(self) -> Seals:
        return Seals(self._state.secret, self._group_id, self.ranks)

    # Groups ---------------------------------------------------------------------------

    def split(self, color: int | None) -> Backend | None:
        """Cuts this group into one group per color; all ranks call it.

        Args:
            color: Ranks of one color form a group, in the order they have here. None: no group.
        """
        choices = self.all_gather_object([color, self._state.next_group_id])
        group_id = max(next_group_id for _, next_group_id in choices)
        self._state.next_group_id = group_id + 1
        if color is None:
            return None
        members = [rank for rank, (chosen, _) in enumerate(choices) if chosen == color]
        made = self._make_group(members, group_id)
        made._group_id = group_id
        return made

    def subgroup(self, ranks: Sequence[int]) -> Backend | None:
        """The group of some ranks of this one; all ranks call it, others get None."""
        members = sorted(set(ranks))
        for member in members:
            self._check_rank("a member", member)
        self.run(ops.Barrier(f"subgroup({members})"))
        return self.split(0 if self.rank in members else None)

    def lane(self, owner: object) -> Backend:
        """A group of the same ranks for ``owner``'s own traffic; all ranks call it.

        What runs in a lane is in no order with what runs here. When the owner is gone, the lane
        is used again.
        """
        return self._lanes_lent.lend(self, owner)

    def become_lane(self) -> None:
        """Nobody but its owner will use this group."""
        self.is_lane = True

    # Counters and the end ---------------------------------------------------------------------

    def stats(self) -> StatisticsSnapshot:
        """Counters of this rank by operation, over all groups of the world; and memory."""
        return self._state.statistics.snapshot()

    def count_in_place(self, num_bytes: int) -> None:
        """Counts a gather that shared memory made unnecessary.

        It has a counter of its own, "gather_in_place": nothing was moved.
        """
        self._state.statistics.count("gather_in_place", num_bytes, 0.0, 0.0)

    def count_reading(self, num_bytes: int, seconds: float) -> None:
        """Counts an all-gather for which this rank has read the memory of others."""
        self._state.statistics.count("all_gather", num_bytes, seconds, 0.0)

    def count_compression(self, raw_bytes: int, sent_bytes: int) -> None:
        """Counts bytes that were sent compressed, and what they would have been otherwise."""
        self._state.statistics.count_compression(raw_bytes, sent_bytes)

    def compare_at_exit(self, recorded: Recorded) -> None:
        """Compares something with ranks that have left before, when this rank leaves."""
        self._state.exit_records.add(self.ranks, recorded)

    def part_by(self, how: str) -> None:
        """Says how this rank will leave: by a call of its own, in the middle of things perhaps."""
        self._state.parting = how

    def check_exit_records(self) -> None:
        """Raises `MismatchError` for what was found when this rank left; once."""
        self._state.exit_records.check()

    def open_account(self) -> Account:
        """An account of memory that `stats` reports."""
        return self._state.statistics.memory.account()

    def reset_stats(self) -> None:
        """Sets the counters back to zero, and the peaks of memory to its present use."""
        self._state.statistics.reset()

    def __enter__(self) -> Self:
        """For ``with``: shuts down at the end."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        """Refused: it has connections to other ranks."""
        raise ShoalError(
            "a group of ranks cannot be copied or pickled, nor a model that was wrapped for it: "
            "build another module and load the wrapped model's state_dict() into it"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"

    def start(self, operation: ops.Operation) -> Work[Any]:
        """Starts an operation for a caller that will often ask how far it is.

        Where ranks share memory it then needs no thread: it goes on whenever the caller asks, or
        starts another one.
        """
        work: Work[Any] = self.run(operation, async_op=True)
        return work

    def _run_often(
        self,
        kind: str,
        detail: object,
        tensor: Tensor | None,
        out: Tensor | None,
        make: Callable[[], ops.Operation],
        async_op: bool,
    ) -> Any:
        """Carries out a collective of training loops, over the fast path if there is one."""
        run_cached = None if async_op else self._run_cached
        if run_cached is not None and isinstance(tensor, Tensor) and isinstance(out, Tensor):
            self._check_open()
            result = run_cached(kind, detail, tensor, out, make)
            if result is not None:
                return result
        return self.run(make(), async_op=async_op)

    def _check_open(self) -> None:
        if self._state.is_closed:
            raise closed_error(self._state, self.rank)

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} must be a rank from 0 to {self.size - 1}; got {rank}")

    def _check_peer(self, what: str, rank: int) -> None:
        self._check_rank(what, rank)
        if rank == self.rank:
            raise ValueError(f"{what} must be another rank; rank {rank} cannot message itself")


def check_tag(tag: int) -> int:
    """Refuses what is no tag."""
    if not 0 <= tag < 2**31:
        raise ValueError(f"a tag must be from 0 to 2**31 - 1; got {tag}")
    return tag

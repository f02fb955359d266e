"""The world: all ranks of a run, as one of them sees it, from anywhere in user code."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast

import torch

from shoal.comm.agreement import agree
from shoal.comm.backend import Backend
from shoal.errors import ClosedError, PeerError, ShoalError
from shoal.system.site import describe

if TYPE_CHECKING:
    from shoal.comm.control.membership import Membership

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _OfBackend(Protocol[P, R]):
    """A method that `World` takes from its backend, as type checkers see it."""

    def __get__(self, world: World, kind: type[World], /) -> Callable[P, R]: ...


def _of_backend(method: Callable[Concatenate[Backend, P], R]) -> _OfBackend[P, R]:
    """The backend's method of the same name, with its types and without a call in between."""
    name = getattr(method, "__name__", "")
    found: Any = property(attrgetter(f"backend.{name}"), doc=method.__doc__)
    return cast(_OfBackend[P, R], found)


class World:
    """The ranks that train together, and the way to talk to them.

    It has the collectives, messages, groups and counters of its backend (``world.broadcast`` ...).

    Example:
        >>> import shoal, torch
        >>> with shoal.init() as world:
        ...     total = world.all_reduce(torch.ones(3))
        ...     names = world.all_gather_object(f"rank {world.rank} of {world.size}")
    """

    all_reduce = _of_backend(Backend.all_reduce)
    reduce = _of_backend(Backend.reduce)
    broadcast = _of_backend(Backend.broadcast)
    all_gather = _of_backend(Backend.all_gather)
    gather = _of_backend(Backend.gather)
    scatter = _of_backend(Backend.scatter)
    reduce_scatter = _of_backend(Backend.reduce_scatter)
    all_to_all = _of_backend(Backend.all_to_all)
    barrier = _of_backend(Backend.barrier)
    send = _of_backend(Backend.send)
    recv = _of_backend(Backend.recv)
    all_gather_object = _of_backend(Backend.all_gather_object)
    gather_object = _of_backend(Backend.gather_object)
    broadcast_object = _of_backend(Backend.broadcast_object)
    scatter_object = _of_backend(Backend.scatter_object)
    all_to_all_object = _of_backend(Backend.all_to_all_object)
    send_object = _of_backend(Backend.send_object)
    recv_object = _of_backend(Backend.recv_object)
    split = _of_backend(Backend.split)
    subgroup = _of_backend(Backend.subgroup)
    lane = _of_backend(Backend.lane)
    empty = _of_backend(Backend.empty)
    stats = _of_backend(Backend.stats)
    reset_stats = _of_backend(Backend.reset_stats)

    def __init__(self, backend: Backend) -> None:
        """Use `shoal.init`, or `shoal.run`."""
        self.backend = backend
        self.membership: Membership | None = None
        """This rank's place in a run whose ranks come and go; None where they do not."""
        self.has_failed = False

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self.backend.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.backend.size

    @property
    def world_size(self) -> int:
        """How many ranks there are; the same as ``size``."""
        return self.backend.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in order."""
        return self.backend.ranks

    @property
    def name(self) -> str:
        """What the backend is called."""
        return self.backend.name

    @property
    def device(self) -> torch.device:
        """Where tensors live that the backend makes on its own."""
        return self.backend.device

    @property
    def timeout(self) -> float:
        """Seconds an alive but late rank is waited for."""
        return self.backend.timeout

    def agree(self, value: Any, how: str | None = None) -> Any:
        """The same decision on every rank, from what each of them thinks; all ranks call it.

        Without ``how`` a bool is true if any rank says so, and a number (or scalar tensor) is the
        mean over the ranks: `if world.agree(patience_is_over)`, `loss = world.agree(loss)`.

        Args:
            value: A bool, a number, a scalar tensor; for "same" and "first" any object.
            how: "any", "all" (bools); "mean", "max", "min" (numbers; NaN if any rank has NaN);
                "first" (rank 0's counts); "same" (what all have, or an error).

        Returns:
            The decision, a plain Python value and equal to the last bit on every rank.

        Raises:
            MismatchError: If ranks that must have the same value differ, or ask differently.

        Example:
            >>> import shoal
            >>> shoal.run(lambda: shoal.world().agree(shoal.world().rank == 1), 2, "memory")
            [True, True]
        """
        return agree(self.backend, value, how)

    def leave(self) -> None:
        """Asks to be let go, in an elastic run; the others go on without this rank.

        It stays until the end of the step that is under way. There `optimizer.attempt()` ends it by
        `SystemExit`, as ``sys.exit()`` would.
        """
        if self.membership is None:
            raise ShoalError(
                "a rank can leave an elastic run only: start it with shoal launch --elastic, or "
                "with shoal.run(..., elastic=shoal.elastic.Elastic())"
            )
        self.membership.leave()

    def shutdown(self) -> None:
        """Leaves the world. Twice is fine.

        Raises:
            MismatchError: If a rank that left before has trained in another way; this rank has
                left then too.
        """
        global _process_world
        self.backend.shutdown()
        if _process_world is self:
            _process_world = None
        if _current.get() is self:
            _current.set(None)
        if not self.has_failed:
            self.backend.check_exit_records()

    def fail(self, error: BaseException) -> None:
        """Tells every other rank that this one cannot go on, and why."""
        self.has_failed = True
        culprit = error.rank if isinstance(error, PeerError) else None
        self.backend.fail(describe(error), culprit=culprit)

    def __enter__(self) -> Self:
        """For ``with``: an exception reaches all ranks, and the world ends with the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publishes the exception, if there is one, and shuts down."""
        if error is not None and not _is_good_exit(error):
            self.fail(error)
        self.shutdown()

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size} over {self.backend.name}>"


def _is_good_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


# A rank that is a thread has its world in its own context. A rank that is a process also
# keeps it here, because threads it starts (a data loader's, autograd's) have a new context.
_current: ContextVar[World | None] = ContextVar("shoal_world", default=None)
_process_world: World | None = None
_worlds_of_threads: weakref.WeakSet[World] = weakref.WeakSet()
_thread = threading.local()


def set_current(world: World, *, process_wide: bool) -> None:
    """Makes a world the one that `current` finds."""
    global _process_world
    _current.set(world)
    if process_wide:
        _process_world = world
    else:
        _worlds_of_threads.add(world)
        _thread.is_rank = True


def find_current() -> World | None:
    """The current world, if there is one."""
    return _current.get() or _process_world


def current() -> World:
    """The current world.

    Raises:
        ClosedError: If none was started.
    """
    world = find_current()
    if world is None:
        raise ClosedError(_no_world())
    return world


def _no_world() -> str:
    is_rank = getattr(_thread, "is_rank", False)
    name = threading.current_thread().name
    is_helper = not is_rank and threading.current_thread() is not threading.main_thread()
    if _worlds_of_threads and is_helper:
        return (
            f"thread {name!r} is no rank: over memory ranks are threads, and this is another "
            "one. Let a rank's own thread make the call, or use processes (backend='shm')"
        )
    if multiprocessing.parent_process() is not None:
        return (
            f"there is no world in process {os.getpid()}, which multiprocessing started. If it "
            "works for a rank, communicate in the rank itself; if it is to be one, call "
            "shoal.init() first"
        )
    return "there is no world yet: call shoal.init() first"

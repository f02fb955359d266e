"""A process's place in a run whose ranks come and go: it registers, regroups, and leaves.

Who is a member is decided where the ranks meet, by the `Roster` that the launcher holds there. The
connection to it stays open as long as the process lives, and nobody listens to it but calls of
this class: what the holder has to say waits there until somebody asks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from shoal.comm.backend import Backend
from shoal.comm.bootstrap.bootstrap import (
    AloneBootstrap,
    Bootstrap,
    MeetingBootstrap,
    find_server,
)
from shoal.comm.bootstrap.connect import connect_backend
from shoal.comm.control.connect import host_id
from shoal.comm.control.membership import Membership, Regrouped, RunComplete
from shoal.comm.process_backend import ProcessBackend
from shoal.comm.world import World, set_current
from shoal.errors import LaunchError, PeerError, ShoalError, TransportError
from shoal.launch.joining.progress import ProgressTeller
from shoal.meeting.address import MEETING_VARIABLE
from shoal.meeting.client import MeetingClient, MeetingGone
from shoal.meeting.roster import PERSON_VARIABLE
from shoal.system.deadline import Deadline, regrouping_text
from shoal.system.site import describe

_LOOK_EVERY_S = 0.5
_ANSWER_S = 10.0
# Of worlds that cannot be connected though nobody died: then something is wrong here.
_MOST_IN_VAIN = 5
_TRANSPORTS = ("shm", "gloo", "mpi")
_MPI_RANK = "OMPI_COMM_WORLD_RANK"


# Of this process; its end is told though the script has left its world before.
_own: list[ProcessMembership] = []


def is_elastic() -> bool:
    """Whether whoever started this process holds a roster."""
    return bool(os.environ.get(PERSON_VARIABLE))


def fail_membership() -> None:
    """This process ends by an error: whoever sees it end will count it as lost."""
    for membership in _own:
        membership.has_failed = True


def end_membership() -> None:
    """Tells the holder of an elastic run that this rank is not lost, but done."""
    for membership in _own:
        membership.end()


class ProcessMembership(Membership):
    """See the module's text."""

    def __init__(self, transport: str, timeout: float) -> None:
        """Registers; `first_world` connects."""
        if transport not in _TRANSPORTS:
            raise LaunchError(
                f"ranks of an elastic run communicate over {' or '.join(_TRANSPORTS)}, not over "
                f"{transport}: choose one of them as the backend"
            )
        if transport == "mpi" and _MPI_RANK not in os.environ:
            raise LaunchError(
                "ranks of an elastic run communicate over mpi if mpiexec has started them: start "
                "the run with shoal launch --elastic --backend mpi"
            )
        self.generation, self.is_leaving, self.has_failed = 0, False, False
        self._transport, self._timeout = transport, timeout
        self._address = os.environ[MEETING_VARIABLE]
        self._client: MeetingClient = find_server(self._address, 0, 1, timeout, 0)
        self._has_told_leave = self._is_change_wanted = self._is_over = False
        self._process = os.getpid()
        person = int(os.environ[PERSON_VARIABLE])
        kind = f"shm {host_id()}" if transport == "shm" else transport
        self._client.tell({"kind": "register", "person": person, "transport": kind})
        answer = self._answer("registered", "refused")
        if "refused" in answer:
            raise LaunchError(f"this process cannot join the run: {answer['refused']}")
        self._is_first = bool(answer["is_first"])
        if transport == "mpi" and not self._is_first:
            raise LaunchError(
                "over MPI ranks can go and not come: use --backend gloo for a run that others join"
            )
        self._world: World | None = None
        self._progress = ProgressTeller(self._client.tell)
        _note_sigterm(self)
        _own[:] = [self]

    def first_world(self) -> World:
        """That of the first generation; for one that comes later, a world of its own."""
        if self._is_first:
            _, _, _, backend = self._connect_next()
        else:
            backend = connect_backend(self._transport, AloneBootstrap(self._timeout), self._timeout)
        self._world = World(backend)
        self._world.membership = self
        set_current(self._world, process_wide=True)
        return self._world

    def require(self, min_ranks: int, max_ranks: int | None, replica: int = 1) -> None:
        """Asks the holder, who may refuse."""
        bounds = {"min": min_ranks, "max": max_ranks, "replica": replica}
        self._client.tell({"kind": "require", **bounds})
        answer = self._answer("noted", "refused")
        if "refused" in answer:
            raise LaunchError(answer["refused"])

    def regroup(self, *, stays: bool = False) -> Regrouped:
        """Abandons the world there is; returns in the next one that can be connected."""
        assert self._world is not None
        old = self._world.backend
        assert isinstance(old, ProcessBackend)
        old.abandon()
        old_size, old_ranks, reasons, backend = self._connect_next(stays=stays)
        self._world.backend = backend
        set_current(self._world, process_wide=True)
        return Regrouped(self._world, old_size, old_ranks, reasons)

    def wants_change(self) -> bool:
        """Reads what the holder has said, and tells it of this rank's progress.

        The holder's end counts as a change.
        """
        try:
            if self.is_leaving:
                self._tell_leave()
            if self._world is not None and self.generation:
                self._progress.look(self._world.backend, self.generation)
            while (notice := self._client.poll("change")) is not None:
                if notice["generation"] == self.generation:  # else it has come true
                    self._is_change_wanted = bool(notice["change"])
        except MeetingGone:
            return True
        return self._is_change_wanted or self.is_leaving

    def leave(self) -> None:
        """Told to the holder by the next `wants_change` or `regroup`."""
        self.is_leaving = True

    def end(self) -> None:
        """This process has come to its end by itself, and does not count as lost."""
        has_failed = self.has_failed or (self._world is not None and self._world.has_failed)
        if self._process == os.getpid() and not self._is_over and not has_failed:
            self._is_over = True
            try:
                self._client.tell({"kind": "depart"})
                self._client.reply(_ANSWER_S, "departed")
            except ShoalError:
                pass  # without a holder there is nobody to tell
            self._client.close()

    # The next world ---------------------------------------------------------------------------

    def _connect_next(
        self, *, stays: bool = False
    ) -> tuple[int, tuple[int | None, ...], dict[int, str], Backend]:
        """What became of the ranks since this call, and the backend of the new world."""
        told = _Told()
        for num_in_vain in range(_MOST_IN_VAIN + 1):
            while True:
                told.add(self._ask(stays=stays))
                try:
                    backend = self._connect(told.world)
                except PeerError:
                    continue  # another is lost: the world after this one has those who are left
                except TransportError:
                    if num_in_vain == _MOST_IN_VAIN:
                        raise
                    break
                self._is_change_wanted = False
                self._progress.begin(backend)
                return told.old_size, told.old_ranks, told.reasons, backend
        raise AssertionError("the last failure is raised")

    def _ask(self, *, stays: bool) -> dict[str, Any]:
        try:
            if self.is_leaving:
                self._tell_leave()
            request = {"kind": "regroup", "generation": self.generation, "stays": stays}
            self._client.tell(request)
            answer = self._await_world()
        except MeetingGone as error:
            raise LaunchError(f"the run has ended: its holder is gone ({error})") from error
        if "left" in answer:
            self._is_over = True
            raise LaunchError("this rank has left the run, as it asked to")
        if "refused" in answer:
            kind = RunComplete if answer.get("is_complete") else LaunchError
            raise kind(f"the run cannot go on: {answer['refused']}")
        world: dict[str, Any] = answer["world"]
        self.generation = world["generation"]
        return world

    def _await_world(self) -> dict[str, Any]:
        """One that waits to be a member waits as long as the run lasts; a member does not.

        A member may be told meanwhile that it is none any more, and waits ("aside").
        """
        deadline = Deadline(self._timeout) if self.generation else None
        keys = ("world", "left", "refused", "aside")
        while True:
            answer: dict[str, Any] | None = self._client.reply_of(_LOOK_EVERY_S, keys)
            if answer is not None and "aside" in answer:
                self.generation, deadline = 0, None
            elif answer is not None:
                return answer
            if self.is_leaving:
                self._tell_leave()
            if deadline is not None:
                deadline.enforce(regrouping_text, self._awaited)

    def _awaited(self) -> list[int]:
        self._client.tell({"kind": "awaited"})
        answer = self._client.reply(_ANSWER_S, "awaited")
        return [] if answer is None else list(answer["awaited"])

    def _connect(self, world: dict[str, Any]) -> Backend:
        rank, size = world["rank"], world["size"]
        bootstrap: Bootstrap = AloneBootstrap(self._timeout)
        if size > 1:
            client = find_server(self._address, rank, size, self._timeout, 0)
            bootstrap = MeetingBootstrap(client, (rank, size), self._timeout, self.generation)
        bootstrap.is_elastic = True
        try:
            hosts = bootstrap.all_gather(host_id().encode())
        except BaseException as error:
            bootstrap.abandon(describe(error))
            raise
        os.environ.update(place_variables(rank, hosts))
        return connect_backend(self._transport, bootstrap, self._timeout)

    def _tell_leave(self) -> None:
        if not self._has_told_leave:
            self._has_told_leave = True
            self._client.tell({"kind": "leave"})
            self._client.reply(_ANSWER_S, "noted")

    def _answer(self, *keys: str) -> dict[str, Any]:
        answer: dict[str, Any] | None = self._client.reply_of(_ANSWER_S, keys)
        if answer is None:
            raise LaunchError(f"the holder of the run ({self._address}) does not answer")
        return answer


def place_variables(rank: int, hosts: Sequence[bytes]) -> dict[str, str]:
    """What scripts read of a rank's place; ``hosts`` has that of each rank."""
    own = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(own.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(own)),
    }


class _Told:
    """What was announced during one call of `regroup`: perhaps several worlds, one after another.

    Attributes:
        world: The last announcement.
        old_size: How many ranks there were when it began.
        old_ranks: For each rank of the last world that of the first.
        reasons: Why ranks of the first world are gone.
    """

    def __init__(self) -> None:
        self.world: dict[str, Any] = {}
        self.old_size = 0
        self.old_ranks: tuple[int | None, ...] = ()
        self.reasons: dict[int, str] = {}

    def add(self, world: dict[str, Any]) -> None:
        """One more."""
        reasons = {int(rank): str(text) for rank, text in world["reasons"]}
        if not self.world:
            self.old_size, self.old_ranks = world["old_size"], tuple(world["old_ranks"])
            self.reasons = reasons
        else:
            before = self.old_ranks
            for rank, text in reasons.items():
                if (first := before[rank]) is not None:
                    self.reasons[first] = text
            self.old_ranks = tuple(
                None if old is None else before[old] for old in world["old_ranks"]
            )
        self.world = world


def _note_sigterm(membership: ProcessMembership) -> None:
    """SIGTERM is a polite request to leave at the end of a step; a second one ends the process."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def note(number: int, frame: object) -> None:
        if membership.is_leaving or os.getpid() != membership._process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        membership.leave()

    signal.signal(signal.SIGTERM, note)

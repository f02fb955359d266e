"""Who takes part in a run over memory whose ranks come and go: threads that meet at a gate.

[Note: the gate]
Ranks that cannot go on in their world come to the gate. Once all that are left of it have come,
those who are to join are started one after the other, each alone, until it comes to the gate
itself. Then all of them go through, into a new world with a new simulator. So only one thread runs
at a time here, too, and a run with losses repeats exactly like any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.comm.control.membership import Membership, Regrouped, RunComplete
from shoal.comm.memory.backend import InMemoryBackend, Simulator
from shoal.comm.world import World, current, set_current
from shoal.comm.world_state import WorldState
from shoal.errors import DeadlineError, LaunchError, MembershipChanged, ShoalError
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import ASIDE, in_words, num_admitted, set_aside
from shoal.system.deadline import regrouping_text
from shoal.torch_support.random_state import RandomState

_LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class Member:
    """A thread that takes part, or is about to."""

    number: int  # among all that were ever started
    rank: int | None = None  # in the world there is; None for one that waits to be a member
    is_waiting: bool = False  # at the gate
    is_leaving: bool = False  # politely
    stays: bool = False  # in the next world, all the same
    fate: str | None = None  # how it has ended
    is_lost: bool = False  # whether that was before its time
    random: RandomState | None = None  # what it goes on with
    regrouped: tuple[Simulator, int, tuple[int | None, ...], dict[int, str]] | None = None
    refusal: ShoalError | None = None


class Gate:
    """Holds one run: who is a member, and who may become one; see [Note: the gate]."""

    def __init__(
        self, ranks: int, timeout: float, bounds: Elastic, start: Callable[[Member], None]
    ) -> None:
        """``start`` begins a new thread, which waits to be a member."""
        self.members = [Member(number, rank=number) for number in range(ranks)]
        self.generation = 1
        self.simulator = Simulator(ranks, timeout, loss=MembershipChanged)
        self._timeout, self._start = timeout, start
        self._first_random = RandomState.capture()
        self._min_ranks, self._max_ranks = bounds.min_ranks, bounds.max_ranks
        self._replica = 1
        self._num_spare = bounds.spares + bounds.restarts
        self._num_invited, self._num_started = 0, ranks
        self._joiners: list[Member] = []
        self._closed: ShoalError | None = None
        self._condition = threading.Condition()

    @property
    def wants_change(self) -> bool:
        """Whether somebody is to come, or wants to go."""
        return self._num_invited > 0 or any(member.is_leaving for member in self.members)

    def require(self, min_ranks: int, max_ranks: int | None, replica: int = 1) -> None:
        """The narrower bounds hold."""
        self._min_ranks, self._replica = max(self._min_ranks, min_ranks), replica
        if max_ranks is not None:
            self._max_ranks = min(max_ranks, self._max_ranks or max_ranks)

    def invite(self, count: int) -> None:
        """So many more ranks are started at the end of a step."""
        room = len(self.members) + self._num_invited + count
        if self._max_ranks is not None and room > self._max_ranks:
            raise LaunchError(f"the run has max_ranks={self._max_ranks}, and {room} are wanted")
        self._num_invited += count

    def first_world(self) -> Simulator:
        """That of one who waits to be a member: it is alone there."""
        return Simulator(1, self._timeout, [self._first_random])

    # Coming and going -------------------------------------------------------------------------

    def pass_through(self, member: Member) -> None:
        """Returns once the next world is there; the caller has left the one before."""
        begin = time.monotonic()
        with self._condition:
            member.random, member.is_waiting = RandomState.capture(), True
            self._advance()
            while member.is_waiting and self._closed is None:
                self._condition.wait(_LOOK_EVERY_S)
                if member.rank is None:  # it waits as long as the run lasts
                    begin = time.monotonic()
                elif time.monotonic() - begin > self._timeout and not self._has_passed(member):
                    raise DeadlineError(regrouping_text(self._timeout, self._awaited))
            refusal = member.refusal if self._closed is None else self._closed
        if refusal is not None:
            raise refusal

    @staticmethod
    def _has_passed(member: Member) -> bool:
        return not member.is_waiting

    def _awaited(self) -> list[int]:
        late = [m.rank for m in self.members if not m.is_waiting and m.fate is None]
        return [rank for rank in late if rank is not None]

    def end(self, member: Member, fate: str, *, is_lost: bool) -> None:
        """A thread ends: its function has returned, or failed (``is_lost``)."""
        with self._condition:
            member.fate, member.is_lost, member.is_waiting = fate, is_lost, False
            self._joiners = [each for each in self._joiners if each is not member]
            if is_lost and self._num_spare:
                self._num_spare, self._num_invited = self._num_spare - 1, self._num_invited + 1
            self._advance()

    def close(self, error: ShoalError) -> None:
        """There is no next world."""
        with self._condition:
            self._closed = error
            self._condition.notify_all()

    # The next world ---------------------------------------------------------------------------

    def _advance(self) -> None:
        """Does what can be done next, under the lock."""
        if any(not member.is_waiting and member.fate is None for member in self.members):
            return  # it still runs in the old world, and will come
        if not any(member.is_waiting for member in self.members):
            self._refuse_all(self._joiners, RunComplete("the run has ended"))
        elif all(joiner.is_waiting for joiner in self._joiners) and not self._start_another():
            self._form()

    def _start_another(self) -> bool:
        staying = sum(member.is_waiting and not member.is_leaving for member in self.members)
        is_full = self._max_ranks is not None and (staying + len(self._joiners) >= self._max_ranks)
        if not self._num_invited or is_full:
            return False
        self._num_invited -= 1
        self._joiners.append(Member(self._num_started))
        self._num_started += 1
        self._start(self._joiners[-1])
        return True

    def _form(self) -> None:
        leaving = [m for m in self.members if m.is_waiting and m.is_leaving and not m.stays]
        self._refuse_all(leaving, LaunchError("this rank has left the run, as it asked to"))
        staying = [member for member in self.members if member.is_waiting]
        num_left = len(staying) + len(self._joiners)
        size = num_left - num_left % self._replica
        if size < self._min_ranks:
            fates = "; ".join(f"rank {m.rank}: {m.fate}" for m in self.members if m.is_lost)
            least = f"min_ranks={self._min_ranks}{in_words(self._replica)}"
            text = f"{num_left} ranks are left, and {least} ({fates})"
            self._refuse_all([*staying, *self._joiners], LaunchError(text))
            return
        reasons = {m.rank: str(m.fate) for m in self.members if m.rank is not None and m.fate}
        coming = self._joiners[: num_admitted(len(staying), len(self._joiners), self._replica)]
        ranks = set_aside([m.is_waiting for m in self.members], len(coming), self._replica)
        aside = [self.members[rank] for rank in ranks]
        staying = [member for member in staying if member not in aside]
        seats, old_size = _seated(staying, coming), len(self.members)
        old_ranks = tuple(member.rank for member in seats)
        self._joiners = [each for each in self._joiners if each not in coming] + aside
        for rank, member in zip(ranks, aside, strict=True):
            reasons[rank], member.rank = ASIDE, None
        self.members, self._num_invited = seats, 0
        self.generation += 1
        random = [each.random or self._first_random for each in seats]
        self.simulator = Simulator(size, self._timeout, random, MembershipChanged)
        for rank, member in enumerate(seats):
            member.regrouped = (self.simulator, old_size, old_ranks, reasons)
            member.rank, member.is_waiting = rank, False
        self._condition.notify_all()

    def _refuse_all(self, members: list[Member], error: ShoalError) -> None:
        for member in members:
            member.refusal, member.is_waiting = error, False
        self._condition.notify_all()


def _seated(staying: list[Member], coming: list[Member]) -> list[Member]:
    """By rank: who stays keeps the rank, as far as there is such a rank; others fill the gaps."""
    size = len(staying) + len(coming)
    seats: dict[int, Member] = {m.rank: m for m in staying if m.rank is not None and m.rank < size}
    others = [m for m in staying if m not in seats.values()] + coming
    free = [rank for rank in range(size) if rank not in seats]
    return [(seats | dict(zip(free, others, strict=True)))[rank] for rank in range(size)]


class ThreadMembership(Membership):
    """One thread's place in an elastic run over memory."""

    def __init__(self, gate: Gate, member: Member, timeout: float) -> None:
        """A member of the first world, or one that waits to be a member of a later one."""
        self._gate, self._member, self._timeout = gate, member, timeout
        self.generation = 1 if member.rank is not None else 0
        self._simulator = gate.simulator if member.rank is not None else gate.first_world()
        self._make_world(member.rank or 0)

    def _make_world(self, rank: int) -> World:
        state, ranks = WorldState(timeout=self._timeout), range(self._simulator.size)
        world = World(InMemoryBackend(state, self._simulator, ranks, rank))
        world.membership = self
        set_current(world, process_wide=False)
        return world

    def begin(self) -> None:
        """Waits for this thread's turn in the world that it has now."""
        self._simulator.enter(current().rank)

    def require(self, min_ranks: int, max_ranks: int | None, replica: int = 1) -> None:
        """Bounds for the number of members."""
        self._gate.require(min_ranks, max_ranks, replica)

    def regroup(self, *, stays: bool = False) -> Regrouped:
        """Goes to the gate, and through it."""
        self._member.is_leaving, self._member.stays = self.is_leaving, stays
        backend = current().backend
        assert isinstance(backend, InMemoryBackend)
        backend.abandon()
        self._gate.pass_through(self._member)
        assert self._member.regrouped is not None
        assert self._member.rank is not None
        self._simulator, old_size, old_ranks, reasons = self._member.regrouped
        self.generation = self._gate.generation
        world = self._make_world(self._member.rank)
        self.begin()
        return Regrouped(world, old_size, old_ranks, reasons)

    def end(self) -> None:
        """This thread takes part in nothing more; the next one has its turn."""
        backend = current().backend
        assert isinstance(backend, InMemoryBackend)
        backend.abandon()

    def wants_change(self) -> bool:
        """Whether somebody was invited, or wants to go; others know from here on if it is this."""
        self._member.is_leaving = self.is_leaving
        return self._gate.wants_change

    def leave(self) -> None:
        """Told to the others by the next `wants_change` or `regroup`."""
        self.is_leaving = True

    def invite(self, count: int = 1) -> None:
        """Has more ranks started, which become members at the end of a step."""
        self._gate.invite(count)

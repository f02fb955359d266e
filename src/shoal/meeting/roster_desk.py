"""Where processes of an elastic run register, ask for the next world and leave.

It stands between the server where ranks meet and the `Roster`: it knows which connection is whose,
and passes on what the roster has to say. A process speaks for itself only, over a connection that
stays open as long as it lives; whoever started it speaks for it when it has ended.

[Note: launchers that are cut off]
The launcher of another host that has started some of the processes says now and then that it lives.
If it is silent for `silence_s`, they count as lost. It is answered, and when it hears nothing for
half of that time it ends them: so nobody can be on both sides of a cable that was cut, and those
that are cut off are gone before the others go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.meeting.roster import ENDING_S, JOINER, Announcement, Roster
from shoal.meeting.server_thread import Guest
from shoal.meeting.silence import silence_s

Tell = Callable[[Guest, Any], None]
_MOST_PERSONS = 100_000


class WaitingShare(NamedTuple):
    """What a member has said of itself.

    Attributes:
        generation: The world that it is about.
        waiting: Which part of the time it has waited for others.
        num_reports: How many times it has said so.
    """

    generation: int
    waiting: float
    num_reports: int


class RosterDesk:
    """Serves one roster. Any thread may call; what is to be told is told by the server's thread.

    Attributes:
        on_world: Called with each announcement, in the server's thread.
        on_change: Wakes the server's thread: there may be something to tell.
        variables: What a process from outside is started with, to be like the others.
        progress: What members have said last, by number.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.on_world: Callable[[Announcement], None] = lambda announcement: None
        self.on_change: Callable[[], None] = lambda: None
        self.variables: dict[str, str] = {}
        self.progress: dict[int, WaitingShare] = {}
        self._lock = threading.Lock()
        self._guests: dict[int, Guest] = {}
        self._numbers: dict[Guest, int] = {}
        self._started_by: dict[Guest, set[int]] = {}
        self._beats: dict[Guest, float] = {}
        self._silence_s = silence_s()
        self._num_worlds = 0
        self._kind = ""
        self._requests: dict[str, Callable[[Guest, dict[str, Any]], Any]] = {
            "register": self._register,
            "regroup": self._regroup,
            "leave": self._leave,
            "depart": self._depart,
            "require": self._require,
            "awaited": lambda guest, message: {"awaited": self.roster.awaited()},
            "expect": self._expect,
            "person-ended": self._hear_of_end,
            "beat": self._beat,
            "progress": self._note_progress,
        }

    # For the process that holds it ----------------------------------------------------------

    def expect(self, role: str) -> int:
        """The number of a process that will be started."""
        with self._lock:
            return self.roster.expect(role)

    def end(self, number: int, reason: str, *, is_good: bool = False) -> None:
        """A process has ended."""
        with self._lock:
            self.roster.end(number, reason, time.monotonic(), is_good=is_good)
        self.on_change()

    def is_listened_to(self) -> bool:
        """Whether another launcher has processes whose end it has not told yet."""
        return any(list(self._started_by.values()))

    # For the server's thread ----------------------------------------------------------------

    def serves(self, kind: object) -> bool:
        """Whether this is a request for the desk."""
        return kind in self._requests

    def serve(self, guest: Guest, message: dict[str, Any], tell: Tell) -> None:
        """Answers a request; an error of a wrong one has changed nothing."""
        with self._lock:
            answer = self._requests[message["kind"]](guest, message)
        if answer is not None:
            tell(guest, answer)

    def broken(self) -> tuple[int, dict[str, Any]] | None:
        """The present generation and why it cannot be formed, if it cannot any more."""
        with self._lock:
            return self.roster.broken()

    def due(self) -> float | None:
        """When `tick` is to be called."""
        silent = [beat + self._silence_s for beat in self._beats.values()]
        with self._lock:
            times = [*silent, self.roster.next_time()]
        return min((each for each in times if each is not None), default=None)

    def tick(self, now: float, tell: Tell) -> None:
        """Tells all what there is to be told."""
        for guest in [each for each, beat in self._beats.items() if now >= beat + self._silence_s]:
            self._give_up(guest, now)
        with self._lock:
            if (due := self.roster.next_time()) is not None and now >= due:
                self.roster.tick(now)
            notices = self.roster.take_notices()
            worlds = self.roster.worlds[self._num_worlds :]
            self._num_worlds += len(worlds)
        for number, notice in notices:
            if number in self._guests:
                tell(self._guests[number], notice)
        for world in worlds:
            self.on_world(world)

    def forget(self, guest: Guest) -> None:
        """A connection has ended, and with a launcher's whoever it has started."""
        number, now = self._numbers.pop(guest, None), time.monotonic()
        with self._lock:
            if number is not None:
                del self._guests[number]
                self.roster.lose(number, now, ENDING_S)
            self._beats.pop(guest, None)
            for each in self._started_by.pop(guest, ()):
                self.roster.lose(each, now)

    def _give_up(self, guest: Guest, now: float) -> None:
        """See [Note: launchers that are cut off]."""
        del self._beats[guest]
        reason = f"its launcher has been silent for {self._silence_s:g} s"
        with self._lock:
            for number in self._started_by.pop(guest, ()):
                self.roster.end(number, reason, now)

    # Requests -------------------------------------------------------------------------------

    def _number(self, guest: Guest) -> int:
        if guest not in self._numbers:
            raise ValueError("it has not registered")
        return self._numbers[guest]

    def _register(self, guest: Guest, message: dict[str, Any]) -> Any:
        number, kind = _whole(message["person"]), str(message["transport"])
        if guest in self._numbers:
            raise ValueError("it has registered before")
        if self._kind not in ("", kind):
            return {
                "refused": f"its transport is {_shown(kind)}, and that of this run "
                f"{_shown(self._kind)}: start it with the backend of the run, over shm on its host"
            }
        is_first = self.roster.register(number)
        self._kind = kind
        self._numbers[guest], self._guests[number] = number, guest
        return {"registered": True, "is_first": is_first}

    def _regroup(self, guest: Guest, message: dict[str, Any]) -> None:
        number, generation = self._number(guest), _whole(message["generation"])
        stays = message["stays"]
        if not isinstance(stays, bool):
            raise TypeError(f"neither true nor false: {stays!r}")
        self.roster.ask(number, generation, time.monotonic(), stays=stays)

    def _leave(self, guest: Guest, message: dict[str, Any]) -> Any:
        self.roster.leave(self._number(guest), time.monotonic())
        return {"noted": True}

    def _depart(self, guest: Guest, message: dict[str, Any]) -> Any:
        """It has come to its end by itself."""
        reason = "it has come to the end of its script"
        self.roster.end(self._number(guest), reason, time.monotonic(), is_good=True)
        return {"departed": True}

    def _require(self, guest: Guest, message: dict[str, Any]) -> Any:
        least, most = _whole(message["min"]), message["max"]
        most = None if most is None else _whole(most)
        number, replica = self._number(guest), _whole(message["replica"])
        against = self.roster.require(number, least, most, time.monotonic(), replica=replica)
        return {"refused": against} if against else {"noted": True}

    def _expect(self, guest: Guest, message: dict[str, Any]) -> Any:
        if len(self.roster.persons) >= _MOST_PERSONS:
            raise ValueError("too many have come")
        number = self.roster.expect(JOINER)
        self._started_by.setdefault(guest, set()).add(number)
        return {"person": number, "variables": self.variables}

    def _hear_of_end(self, guest: Guest, message: dict[str, Any]) -> Any:
        number, is_good = _whole(message["person"]), message["is_good"]
        if not isinstance(is_good, bool) or number not in self.roster.persons:
            raise ValueError("no end of a process")
        for started in self._started_by.values():
            started.discard(number)
        reason = str(message["reason"])
        self.roster.end(number, reason, time.monotonic(), is_good=is_good)
        return {"was_member": self.roster.persons[number].rank is not None}

    def _note_progress(self, guest: Guest, message: dict[str, Any]) -> None:
        number, generation = self._number(guest), _whole(message["generation"])
        count = self.progress[number].num_reports if number in self.progress else 0
        self.progress[number] = WaitingShare(generation, float(message["waiting"]), count + 1)

    def _beat(self, guest: Guest, message: dict[str, Any]) -> Any:
        if guest not in self._started_by:
            raise ValueError("it has started nobody, or has been given up")
        self._beats[guest] = time.monotonic()
        return {"beat": True}


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"no whole number: {value!r}")
    return value


def _shown(kind: str) -> str:
    """A transport without the host that it is bound to."""
    return kind.partition(" ")[0]

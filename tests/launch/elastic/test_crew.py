"""Who is started in whose place, and when a run is over: told without processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.launch.elastic.account import RunAccount, change_text, replacements
from shoal.launch.elastic.crew import Crew
from shoal.launch.elastic.stragglers import Stragglers
from shoal.launch.script.summary import Ending
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import JOINER
from shoal.meeting.roster_desk import WaitingShare
from shoal.meeting.server import MeetingServer


class Run:
    """A crew, and what its processes say."""

    def __init__(self, server: MeetingServer, ranks: int, options: Elastic) -> None:
        self.started: list[tuple[int, int, int]] = []
        self.crew = Crew(server, ranks, options, lambda *how: self.started.append(how))
        self.roster = self.crew.roster
        self.crew.begin()

    def come(self, *numbers: int) -> None:
        for number in numbers:
            self.roster.register(number)

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            person = self.roster.persons[number]
            self.roster.ask(number, 0 if person.rank is None else self.roster.generation, 0.0)

    def begin(self, *numbers: int) -> None:
        self.come(*numbers)
        self.ask(*numbers)

    def members(self) -> list[int]:
        return [person.number for person in self.roster.members()]


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    with MeetingServer.on_one_host() as server:
        yield server


def test_workers_and_spares_are_told_who_they_are(server: MeetingServer) -> None:
    assert Run(server, 2, Elastic(spares=1)).started == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]


def test_as_many_are_started_anew_as_may_be(server: MeetingServer) -> None:
    run = Run(server, 2, Elastic(restarts=1))
    run.begin(0, 1)
    run.crew.note_end(0, -9, "killed")
    assert run.started[2:] == [(2, 0, 1)]
    run.begin(2)
    run.ask(1)
    assert run.members() == [2, 1]
    run.crew.note_end(1, 1, "an error")
    assert len(run.started) == 3


def test_one_that_leaves_or_ends_well_is_not_replaced(server: MeetingServer) -> None:
    run = Run(server, 3, Elastic(restarts=9))
    run.begin(0, 1, 2)
    run.roster.leave(0, 0.0)
    run.crew.note_end(0, -15, "killed by its second SIGTERM")
    assert run.crew.is_going_on
    assert not run.crew.has_result
    run.crew.note_end(1, 0, "")
    assert run.crew.has_result
    run.crew.note_end(2, -9, "killed")  # there is a result already: a new one had nothing to do
    assert len(run.started) == 3
    assert not run.crew.is_going_on


def test_one_whose_connection_ended_first_is_replaced_all_the_same(server: MeetingServer) -> None:
    run = Run(server, 2, Elastic(restarts=1))
    run.begin(0, 1)
    run.roster.lose(0, 0.0, wait_s=0.0)
    run.roster.tick(1.0)
    assert not run.roster.persons[0].is_alive
    run.crew.note_end(0, 1, "an error")
    assert len(run.started) == 3


def test_the_run_goes_on_with_those_from_outside(server: MeetingServer) -> None:
    run = Run(server, 1, Elastic())
    run.begin(0)
    joiner = run.crew.desk.expect(JOINER)
    run.begin(joiner)
    run.ask(0)
    run.crew.note_end(0, -9, "killed")
    assert run.crew.is_going_on
    run.crew.desk.end(joiner, "the end", is_good=True)
    assert not run.crew.is_going_on


def test_those_that_wait_at_the_end_are_not_needed(server: MeetingServer) -> None:
    run = Run(server, 1, Elastic(spares=2, restarts=1))
    run.begin(0, 1)
    run.crew.note_end(0, 0, "")
    assert run.crew.end() == [1, 2]
    run.crew.note_end(1, -9, "not needed")
    assert len(run.started) == 3


def test_a_change_is_told_in_one_line(server: MeetingServer) -> None:
    run = Run(server, 3, Elastic(spares=1))
    run.begin(0, 1, 2, 3)
    joiner = run.crew.desk.expect(JOINER)
    run.begin(joiner)
    run.crew.note_end(1, -9, "killed by SIGKILL")
    run.ask(0, 2)
    assert change_text(run.roster, run.roster.worlds[-1]) == (
        "generation 2, 4 rank(s): worker 1 (rank 1) is gone: killed by SIGKILL; "
        "worker 3 takes the place of worker 1 as rank 1; worker 4 joins as rank 3."
    )


def test_a_place_may_be_taken_later(server: MeetingServer) -> None:
    run = Run(server, 3, Elastic(spares=1))
    run.begin(0, 1, 2)
    run.crew.note_end(0, -9, "killed")
    run.ask(1, 2)
    run.begin(3)
    run.ask(1, 2)
    assert run.members() == [1, 2, 3]
    assert replacements(run.roster) == {0: 3}


def test_the_account_of_the_end(server: MeetingServer) -> None:
    run = Run(server, 2, Elastic(min_ranks=1, spares=1))
    run.begin(0, 1, 2)
    run.crew.note_end(0, -9, "killed by SIGKILL")
    run.ask(1)
    run.crew.note_end(1, 1, "ValueError: no")
    failed = [Ending(0, -9, 1.0), Ending(1, 1, 2.0, b"no")]
    account = RunAccount(run.roster, failed, 1)
    assert account.exit_code == 1
    assert account.text(is_shown=False) == (
        "shoal: the run could not go on: no worker was left.\n"
        "  worker 0 (rank 0): killed by SIGKILL; worker 2 took its place\n"
        "  worker 1 (rank 1): ValueError: no; nobody took its place\n\n  no"
    )
    run.crew.note_end(2, 0, "")
    account = RunAccount(run.roster, failed, 1)
    assert account.exit_code == 0
    assert account.text(is_shown=False).startswith("shoal: the run has finished with 1 rank(s)")


def test_nothing_is_said_where_nobody_was_lost(server: MeetingServer) -> None:
    run = Run(server, 2, Elastic(spares=1))
    run.begin(0, 1, 2)
    for number in (0, 1):
        run.crew.note_end(number, 0, "")
    account = RunAccount(run.roster, [], 1)
    assert (account.exit_code, account.text(is_shown=True)) == (0, "")


def test_one_that_waits_much_less_than_the_others_is_told_once(server: MeetingServer) -> None:
    run, stragglers = Run(server, 3, Elastic()), Stragglers()
    run.begin(0, 1, 2)

    def news(count: int, *waiting: float, generation: int = 1) -> list[str]:
        reports = {n: WaitingShare(generation, share, count) for n, share in enumerate(waiting)}
        return stragglers.news(run.roster, reports)

    assert news(1, 0.5, 0.0) == []  # one has said nothing yet
    assert news(1, 0.5, 0.0, 0.5, generation=0) == []
    for count in (1, 1, 2, 3):  # it may be by chance
        assert news(count, 0.5, 0.0, 0.5) == []
    assert news(4, 0.5, 0.0, 0.5) == [
        "worker 1 (rank 1) holds the others up: it waits 0% of the time and they 50%, so it takes "
        "2.0 times as long for its part of a step."
    ]
    assert news(5, 0.5, 0.0, 0.5) == []
    assert news(6, 0.3, 0.2, 0.3) == []  # it has caught up
    assert news(7, 0.6, 0.0, 0.5) == []
    assert len(news(10, 0.6, 0.0, 0.5)) == 1


def test_a_replica_that_is_not_whole_waits_and_is_back_in_words(server: MeetingServer) -> None:
    run = Run(server, 4, Elastic(restarts=1))
    run.begin(0, 1, 2, 3)
    run.roster.require(0, 2, None, 0.0, replica=2)
    run.crew.note_end(1, -9, "killed")
    run.ask(0, 2, 3)
    run.begin(4)
    run.ask(2, 3)
    less, more = run.roster.worlds[1:]
    assert change_text(run.roster, less) == (
        "generation 2, 2 rank(s): worker 0 (rank 0): it waits until there are enough ranks for "
        "another replica of the model; worker 1 (rank 1) is gone: killed."
    )
    assert change_text(run.roster, more) == (
        "generation 3, 4 rank(s): worker 0 is back as rank 2; worker 4 takes the place of "
        "worker 1 as rank 3."
    )

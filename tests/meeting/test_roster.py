"""Who is a member of an elastic run: by example, and by random stories of one."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.meeting.client import MeetingClient
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import JOINER, LOST_S, SPARE, WORKER, PersonStage, Roster, set_aside
from shoal.meeting.roster_desk import RosterDesk
from shoal.meeting.server import MeetingServer


class Run:
    """A roster, a clock, and what each process was told."""

    def __init__(self, ranks: int, join_s: float = 0.0, **options: Any) -> None:
        self.roster = Roster(ranks, Elastic(**options), join_s)
        self.now = 100.0
        self.heard: dict[int, list[dict[str, Any]]] = {}
        for _ in range(ranks):
            self.roster.expect(WORKER)

    def begin(self) -> Run:
        for number in list(self.roster.persons):
            if self.roster.register(number):
                self.ask(number)
        return self

    def outsider(self, role: str) -> int:
        number = self.roster.expect(role)
        assert not self.roster.register(number)
        self.ask(number)
        return number

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            person = self.roster.persons[number]
            generation = 0 if person.rank is None else self.roster.generation
            self.roster.ask(number, generation, self.now)
        self.listen()

    def end(self, *numbers: int, is_good: bool = False) -> None:
        for number in numbers:
            self.roster.end(number, f"end of {number}", self.now, is_good=is_good)
        self.listen()

    def leave(self, number: int) -> None:
        self.roster.leave(number, self.now)
        self.listen()

    def listen(self) -> None:
        for number, notice in self.roster.take_notices():
            if "change" in notice:
                notice = {"change": notice["change"]}
            self.heard.setdefault(number, []).append(notice)

    def last(self, number: int) -> dict[str, Any]:
        return self.heard[number][-1]

    def members(self) -> list[int]:
        return [each.number for each in self.roster.present]


def test_the_first_generation_is_whole() -> None:
    run = Run(3)
    for number in range(3):
        assert run.roster.register(number)
    run.ask(2, 0)
    assert run.heard == {}
    run.ask(1)
    assert run.members() == [0, 1, 2]
    worlds = [run.last(number)["world"] for number in range(3)]
    assert [world.pop("rank") for world in worlds] == [0, 1, 2]
    assert worlds == [worlds[0]] * 3
    assert worlds[0]["generation"] == 1


def test_one_that_dies_before_it_came_is_not_waited_for() -> None:
    run = Run(3)
    for number in (0, 2):
        run.roster.register(number)
        run.ask(number)
    run.end(1)
    assert run.members() == [0, 2]


def test_its_replacement_is_waited_for_in_the_first_generation() -> None:
    run = Run(2)
    run.roster.register(0)
    run.ask(0)
    late = run.roster.expect(WORKER)
    run.end(1)
    assert run.heard == {}
    assert run.roster.register(late)
    run.ask(late)
    assert run.members() == [0, late]


def test_survivors_close_up_in_order() -> None:
    run = Run(4).begin()
    run.end(1)
    assert run.last(0) == {"change": True}
    run.ask(0, 3)
    assert run.roster.awaited() == [2]
    run.ask(2)
    world = run.last(3)["world"]
    assert run.members() == [0, 2, 3]
    assert (world["old_size"], world["old_ranks"]) == (4, [0, 2, 3])
    assert world["reasons"] == [[1, "end of 1"]]


def test_a_spare_takes_the_rank_of_the_dead_and_nobody_else_moves() -> None:
    run = Run(3).begin()
    spare = run.outsider(SPARE)
    assert run.members() == [0, 1, 2]
    assert spare not in run.heard
    run.end(0)
    run.ask(1, 2)
    assert run.members() == [spare, 1, 2]
    assert run.last(1)["world"]["old_ranks"] == [None, 1, 2]


def test_two_died_and_one_came() -> None:
    run = Run(4).begin()
    spare = run.outsider(SPARE)
    run.end(0, 2)
    run.ask(1, 3)
    assert run.members() == [spare, 1, 3]


def test_a_joiner_is_one_more_and_waits_for_the_others() -> None:
    run = Run(2, max_ranks=3).begin()
    first, second = run.outsider(JOINER), run.outsider(JOINER)
    assert run.last(0) == run.last(1) == {"change": True}
    run.ask(1, 0)
    assert run.members() == [0, 1, first]
    assert second not in run.heard  # there is room for three
    run.end(first)
    run.ask(0, 1)
    assert run.members() == [0, 1, second]


def test_one_that_leaves_is_let_go_and_not_replaced() -> None:
    run = Run(3).begin()
    run.outsider(SPARE)
    run.leave(1)
    assert run.last(0) == {"change": True}
    run.ask(0, 1, 2)
    assert run.last(1) == {"left": True}
    assert run.members() == [0, 2]
    assert run.last(0)["world"]["reasons"] == [[1, "it left, as it had asked to"]]


def test_one_that_leaves_takes_part_after_a_loss() -> None:
    run = Run(3).begin()
    run.roster.leave(0, run.now)
    run.roster.end(1, "killed", run.now)
    for number in (0, 2):
        run.roster.ask(number, 1, run.now, stays=True)
    assert [person.number for person in run.roster.members()] == [0, 2]
    for number in (0, 2):
        run.roster.ask(number, 2, run.now)
    assert [person.number for person in run.roster.members()] == [2]


def test_one_that_leaves_is_replaced_where_there_would_be_too_few() -> None:
    run = Run(2, min_ranks=2).begin()
    spare = run.outsider(SPARE)
    run.leave(0)
    run.ask(0, 1)
    assert run.members() == [spare, 1]


def test_too_few_are_all_told_why() -> None:
    run = Run(3, min_ranks=3).begin()
    run.end(1)
    run.ask(0)
    assert "refused" not in run.last(0)
    run.ask(2)
    assert run.last(0) == run.last(2)
    assert "at least 3 rank(s) and has 2 left" in run.last(0)["refused"]
    assert "rank 1 is gone: end of 1" in run.last(0)["refused"]
    late = run.outsider(JOINER)
    assert run.last(late) == run.last(0)


def test_too_few_wait_for_one_that_is_on_its_way() -> None:
    run = Run(2, min_ranks=2).begin()
    late = run.roster.expect(WORKER)
    run.end(1)
    run.ask(0)
    assert run.last(0) == {"change": True}
    assert run.roster.next_time() is None
    run.roster.register(late)
    run.ask(late)
    assert run.members() == [0, late]


def test_too_few_may_wait_for_one_from_outside_and_not_for_ever() -> None:
    run = Run(2, min_ranks=2, join_s=5.0).begin()
    run.end(1)
    run.ask(0)
    assert run.roster.next_time() == run.now + 5.0
    run.now += 5.0
    run.roster.tick(run.now)
    run.listen()
    assert "refused" in run.last(0)


def test_the_end_of_all_is_the_end_of_those_that_wait() -> None:
    run = Run(2).begin()
    spare = run.outsider(SPARE)
    run.end(0, 1, is_good=True)
    assert run.last(spare) == {"refused": "the run has come to its end", "is_complete": True}


def test_spares_go_on_where_all_have_died() -> None:
    run = Run(2).begin()
    spare = run.outsider(SPARE)
    run.end(0, 1)
    assert run.members() == [spare]


def test_a_lost_connection_is_a_death_after_a_moment() -> None:
    run = Run(2).begin()
    run.roster.lose(1, run.now)
    run.ask(0)
    assert run.members() == [0, 1]
    assert run.roster.generation == 1
    run.roster.tick(run.now + LOST_S)
    assert run.members() == [0]


def test_a_word_from_an_older_generation_changes_nothing() -> None:
    run = Run(2).begin()
    run.ask(0, 1)
    assert run.roster.generation == 2
    run.roster.ask(0, 1, run.now)
    run.listen()
    assert run.last(0) == {"refused": "the run is in generation 2, not 1"}
    assert run.roster.persons[0].stage is PersonStage.THERE


def test_bounds_that_cannot_be_are_refused() -> None:
    run = Run(3, max_ranks=4).begin()
    assert run.roster.require(0, 4, None, run.now) == "min_ranks=4, but there are 3 ranks"
    assert run.roster.require(0, 1, 2, run.now) == "max_ranks=2, but there are 3 ranks"
    assert "at least 5 and at most 4" in run.roster.require(0, 5, None, run.now)
    assert run.roster.require(0, 3, 3, run.now) == ""
    run.outsider(JOINER)
    assert 0 not in run.heard or run.last(0) != {"change": True}
    run.end(0)
    run.ask(1, 2)
    assert run.members() == [3, 1, 2]


def test_a_forming_world_that_lost_one_is_known_as_broken() -> None:
    run = Run(3).begin()
    assert run.roster.broken() is None
    run.end(2)
    assert run.roster.broken() == (1, {"rank": 2, "reason": "end of 2"})
    run.ask(0, 1)
    assert run.roster.broken() is None


@pytest.mark.parametrize("wrong", [-1, 7, None, "0"])
def test_nobody_registers_who_was_not_expected(wrong: Any) -> None:
    with pytest.raises(KeyError):
        Run(2).roster.register(wrong)


def replicas(ranks: int, replica: int, **options: Any) -> Run:
    run = Run(ranks, **options).begin()
    assert run.roster.require(0, replica, None, run.now, replica=replica) == ""
    return run


def test_the_rest_of_a_replica_waits_until_it_is_whole() -> None:
    run = replicas(6, 2)
    run.end(2)
    run.ask(0, 1, 3, 4, 5)
    assert run.members() == [0, 1, 4, 5]
    assert run.heard[3][-1] == {"aside": True}
    reasons = dict(run.last(0)["world"]["reasons"])
    assert reasons[2] == "end of 2"
    assert "another replica" in reasons[3]
    assert run.last(0).keys() == {"world"}  # one alone is no reason for another change
    late = run.outsider(WORKER)
    assert run.last(0) == {"change": True}
    run.ask(0, 1, 4, 5)
    assert run.members() == [0, 1, 4, 5, 3, late]
    assert run.last(3)["world"]["old_ranks"] == [0, 1, 2, 3, None, None]


def test_two_that_lost_their_partners_are_a_replica() -> None:
    run = replicas(6, 2)
    run.end(0, 3)
    run.ask(1, 2, 4, 5)
    assert run.members() == [1, 2, 4, 5]


def test_one_whose_neighbour_is_gone_stays() -> None:
    """It has the only copy of what that one had, or that one had the copy of its own."""
    assert set_aside([False, True, True, True], 0, 2) == [1]
    for first, second in itertools.permutations(range(8), 2):
        if abs(first - second) == 4:
            continue
        is_there = [rank not in (first, second) for rank in range(8)]
        gone = {first, second, *set_aside(is_there, 0, 4)}
        assert len(gone) == 4
        assert not any((rank + 4) % 8 in gone for rank in gone)
        assert set_aside(is_there, 2, 4) == []


def test_spares_come_only_as_whole_replicas() -> None:
    run = replicas(2, 2, max_ranks=6)
    first = run.outsider(JOINER)
    assert 0 not in run.heard or run.last(0) != {"change": True}
    second = run.outsider(JOINER)
    assert run.last(0) == {"change": True}
    run.ask(0, 1)
    assert run.members() == [0, 1, first, second]
    run.end(second)
    run.ask(0, 1, first)
    assert run.members() == [0, 1]
    third = run.outsider(JOINER)
    run.ask(0, 1)
    assert run.members() == [0, 1, first, third]


def test_one_that_waits_for_its_replica_is_not_counted_twice() -> None:
    run = replicas(4, 2, max_ranks=10)
    joiner, last = run.outsider(JOINER), run.outsider(JOINER)
    run.ask(0, 1, 2, 3)
    for _ in range(2):
        run.end(last)
        run.ask(0, 1, 2, 3, joiner)
        assert run.members() == [0, 1, 2, 3]
        last = run.outsider(WORKER)
        run.ask(0, 1, 2, 3)
        assert run.members() == [0, 1, 2, 3, last, joiner]
    run.outsider(SPARE), run.outsider(SPARE)
    assert run.last(0).keys() == {"world"}


def test_less_than_a_replica_is_the_end_and_waits_for_those_on_their_way() -> None:
    run = replicas(4, 4)
    late = run.roster.expect(WORKER)
    run.end(1)
    run.ask(0, 2, 3)
    assert "world" in run.last(0) or run.last(0) == {"change": True}
    assert run.roster.generation == 1
    run.end(late)
    assert "at least 4 rank(s) (4 hold one model between them) and has 3" in run.last(0)["refused"]


def test_ranks_agree_on_what_a_replica_is() -> None:
    run = replicas(4, 2)
    assert "where others have 2" in run.roster.require(1, 1, None, run.now, replica=1)


class Story(RuleBasedStateMachine):
    """Processes come, ask, die and leave in any order, and what must hold holds."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(3, min_ranks=2, max_ranks=5)
        self.generation_of: dict[int, int] = {}
        self.over: set[int] = set()

    def living(self, *stages: PersonStage) -> list[int]:
        return [
            number
            for number, each in self.run.roster.persons.items()
            if each.stage in stages and number not in self.over
        ]

    def listen(self) -> None:
        """Every notice of a world is the same but for the rank, and each number is new."""
        before = self.run.heard
        self.run.heard = {}
        self.run.listen()
        worlds: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for number, notices in self.run.heard.items():
            for notice in notices:
                if "world" in notice:
                    world = dict(notice["world"])
                    assert world["generation"] > self.generation_of.get(number, 0)
                    self.generation_of[number] = world["generation"]
                    worlds.setdefault(world["generation"], []).append((world.pop("rank"), world))
                if "left" in notice or "refused" in notice:
                    self.over.add(number)
        for told in worlds.values():
            assert sorted(rank for rank, _ in told) == list(range(told[0][1]["size"]))
            assert all(world == told[0][1] for _, world in told)
        self.run.heard = before

    @precondition(lambda self: len(self.run.roster.persons) < 12)
    @rule(role=st.sampled_from([WORKER, SPARE, JOINER]))
    def expect(self, role: str) -> None:
        self.run.roster.expect(role)

    @precondition(lambda self: self.living(PersonStage.EXPECTED))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.living(PersonStage.EXPECTED)))
        if self.run.roster.register(number):
            self.run.roster.ask(number, 0, self.run.now)
        self.listen()

    @precondition(lambda self: self.living(PersonStage.THERE))
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.living(PersonStage.THERE)))
        person = self.run.roster.persons[number]
        generation = 0 if person.rank is None else self.run.roster.generation
        self.run.roster.ask(number, generation, self.run.now)
        self.listen()

    @precondition(
        lambda self: self.living(PersonStage.EXPECTED, PersonStage.THERE, PersonStage.ASKING)
    )
    @rule(data=st.data(), is_good=st.booleans())
    def end(self, data: st.DataObject, is_good: bool) -> None:
        stages = (PersonStage.EXPECTED, PersonStage.THERE, PersonStage.ASKING)
        number = data.draw(st.sampled_from(self.living(*stages)))
        self.run.roster.end(number, "it died", self.run.now, is_good=is_good)
        self.listen()

    @precondition(lambda self: self.living(PersonStage.THERE, PersonStage.ASKING))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.living(PersonStage.THERE, PersonStage.ASKING)))
        self.run.roster.leave(number, self.run.now)
        self.listen()

    @precondition(lambda self: self.living(PersonStage.THERE, PersonStage.ASKING))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.living(PersonStage.THERE, PersonStage.ASKING)))
        self.run.roster.lose(number, self.run.now)
        self.run.now += 2 * LOST_S
        self.run.roster.tick(self.run.now)
        self.listen()

    @rule()
    def wait(self) -> None:
        self.run.now += 0.1
        self.run.roster.tick(self.run.now)
        self.listen()

    @invariant()
    def generations_only_grow(self) -> None:
        numbers = [world.generation for world in self.run.roster.worlds]
        assert numbers == sorted(set(numbers))

    @invariant()
    def nobody_is_in_two_places(self) -> None:
        present = self.run.roster.present
        assert len({each.number for each in present}) == len(present)
        assert [each.rank for each in present] == list(range(len(present)))
        assert len(present) <= 5

    @invariant()
    def whoever_waits_waits_for_somebody(self) -> None:
        """Members that ask wait for a member that does not, or for one on its way."""
        roster = self.run.roster
        asking = [each for each in roster.members() if each.stage is PersonStage.ASKING]
        if asking and not roster.awaited():
            on_the_way = [each for each in roster.outside() if each.stage is not PersonStage.ASKING]
            assert on_the_way
            assert len(asking) < 2

    @invariant()
    def survivors_keep_their_order(self) -> None:
        for world in self.run.roster.worlds:
            old = [rank for rank in world.old_ranks if rank is not None]
            assert old == sorted(old)
            if len(world.members) == world.old_size:
                assert all(rank in (None, new) for new, rank in enumerate(world.old_ranks))


class ReplicaStory(Story):
    """The same, where two ranks hold one model between them."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(4, min_ranks=2, max_ranks=5)
        assert self.run.roster.require(0, 2, None, self.run.now, replica=2) == ""

    @invariant()
    def members_are_whole_replicas(self) -> None:
        worlds = self.run.roster.worlds[1:]  # before the first nobody has said what a replica is
        assert all(len(world.members) % 2 == 0 for world in worlds)


TestReplicaStory = ReplicaStory.TestCase
TestReplicaStory.settings = settings(
    max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestStory = Story.TestCase
TestStory.settings = settings(
    max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)


FIELDS = ("person", "generation", "min", "max", "reason", "is_good", "transport", "replica")
KINDS = ("register", "regroup", "leave", "depart", "require", "awaited", "expect", "person-ended")
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.none())


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_a_malformed_request_changes_nothing(kind: str, fields: dict[str, Any]) -> None:
    """From one that has not registered; what it may do is to announce a joiner."""
    desk = RosterDesk(Run(2).begin().roster)
    stages = [each.stage for each in desk.roster.persons.values()]
    guest: Any = object()
    if kind in ("register", "person-ended") and fields.get("person") in (0, 1, False, True):
        fields["person"] = 77
    with contextlib.suppress(KeyError, TypeError, ValueError):
        desk.serve(guest, {**fields, "kind": kind}, lambda *told: None)
    assert [each.stage for each in desk.roster.persons.values()][:2] == stages
    assert desk.roster.generation == 1
    assert not desk.roster.refusal


def test_ten_thousand_strange_words_and_the_run_goes_on() -> None:
    """Each ends its connection, and nothing else."""
    roster = Run(2).begin().roster
    words = itertools.cycle([[], 7, None, {"kind": "regroup"}, {"kind": []}, {"kind": "register"}])
    with MeetingServer.on_one_host() as server:
        server.hold(roster)
        for word in itertools.islice(words, 10_000):
            with contextlib.closing(MeetingClient(server.address)) as client:
                client.tell(word)
        with contextlib.closing(MeetingClient(server.address)) as client:
            client.tell({"kind": "awaited"})
            assert client.reply(20) == {"awaited": [0, 1]}
    assert (roster.generation, len(roster.persons)) == (1, 2)

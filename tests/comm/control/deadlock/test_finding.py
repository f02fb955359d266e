"""Who is stuck, from records alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from shoal.comm.control.deadlock import finding
from shoal.comm.control.deadlock.finding import report, stuck_with
from shoal.comm.control.deadlock.record import (
    OPERATION,
    RECV,
    SEND,
    SETTLED,
    Awaited,
    LongWait,
    RankProgress,
    WaitRecord,
)

Messages = Mapping[tuple[int, str, int, int], int]


def record(
    *waits: tuple[Awaited, Sequence[int]],
    groups: Mapping[int, tuple[int, int]] | None = None,
    messages: Messages | None = None,
    call: str = "world.barrier() at a.py:1",
) -> WaitRecord:
    found = [
        LongWait(serial, awaited, tuple(missing), f"group {awaited.group_id}")
        for serial, (awaited, missing) in enumerate(waits)
    ]
    return WaitRecord(found, RankProgress(groups or {}, messages or {}), call)


def begins(group: int, number: int) -> Awaited:
    return Awaited(OPERATION, group, number)


def test_two_groups_in_opposite_order() -> None:
    records = {
        0: record((begins(1, 5), [1]), groups={1: (5, 0), 2: (3, 0)}),
        1: record((begins(2, 4), [0]), groups={1: (4, 0), 2: (4, 0)}),
    }
    assert stuck_with(0, records) == stuck_with(1, records) == [0, 1]


def test_a_header_on_its_way_is_no_deadlock() -> None:
    """Rank 0 has begun what rank 1 waits for: rank 1 only has not heard of it yet."""
    records = {
        0: record((begins(1, 5), [1]), groups={1: (5, 0), 2: (4, 0)}),
        1: record((begins(2, 4), [0]), groups={1: (4, 0), 2: (4, 0)}),
    }
    assert stuck_with(0, records) == stuck_with(1, records) == []


def test_ranks_in_the_same_operation_wait_for_data() -> None:
    records = {rank: record((begins(0, 7), [1 - rank]), groups={0: (7, 0)}) for rank in (0, 1)}
    assert stuck_with(0, records) == []


def test_a_rank_that_shows_nothing_may_come() -> None:
    records = {0: record((begins(1, 1), [1, 2])), 1: record((begins(2, 1), [2]))}
    assert stuck_with(0, records) == stuck_with(1, records) == []


def test_one_missing_rank_that_is_stuck_is_enough() -> None:
    records = {
        0: record((begins(0, 1), [1, 2]), groups={0: (1, 0)}),
        1: record((begins(1, 1), [0]), groups={1: (1, 0)}),
    }
    assert stuck_with(0, records) == [0, 1]


def test_whoever_waits_for_a_cycle_is_stuck_with_it_and_not_the_reverse() -> None:
    records = {
        0: record((begins(1, 1), [1]), groups={1: (1, 0)}),
        1: record((begins(2, 1), [0]), groups={2: (1, 0)}),
        2: record((begins(3, 1), [0]), groups={3: (1, 0)}),
        3: record((begins(4, 1), [5]), groups={4: (1, 0)}),
    }
    assert stuck_with(2, records) == [0, 1, 2]
    assert stuck_with(0, records) == [0, 1]
    assert stuck_with(3, records) == []


def test_a_rank_with_one_wait_that_may_end_goes_on() -> None:
    """Two threads: one waits in a cycle, the other for a rank that computes."""
    records = {
        0: record((begins(1, 1), [1]), (begins(3, 1), [2]), groups={1: (1, 0), 3: (1, 0)}),
        1: record((begins(2, 1), [0]), groups={2: (1, 0)}),
    }
    assert stuck_with(0, records) == stuck_with(1, records) == []


def test_messages_meet_by_tag_and_number() -> None:
    sends, receives = Awaited(SEND, 0, 2, tag=7), Awaited(RECV, 0, 1, tag=8)
    records = {
        0: record((sends, [1]), messages={(0, "send", 1, 7): 2}),
        1: record((receives, [0]), messages={(0, "recv", 0, 7): 1, (0, "recv", 0, 8): 1}),
    }
    assert stuck_with(0, records) == [0, 1]
    answered = record((receives, [0]), messages={(0, "recv", 0, 7): 2, (0, "recv", 0, 8): 1})
    assert stuck_with(0, {**records, 1: answered}) == []


def test_messages_that_were_too_many_to_tell_prove_nothing() -> None:
    progress = RankProgress({}, None)
    waits = [LongWait(1, Awaited(RECV, 0, 1), (1,), "the world")]
    others = [LongWait(1, Awaited(RECV, 0, 1), (0,), "the world")]
    records = {0: WaitRecord(waits, progress, ""), 1: WaitRecord(others, progress, "")}
    assert stuck_with(0, records) == []


def test_parts_that_are_left_to_do() -> None:
    """Rank 1 has shown its half of a posted reduction and waits elsewhere."""
    records = {
        0: record((Awaited(SETTLED, 1, 3), [1]), groups={1: (3, 3)}),
        1: record((begins(0, 1), [0]), groups={0: (1, 0), 1: (3, 2)}),
    }
    assert stuck_with(0, records) == [0, 1]
    done = record((begins(0, 1), [0]), groups={0: (1, 0), 1: (3, 3)})
    assert stuck_with(0, {**records, 1: done}) == []


def test_right_programs_are_never_stuck() -> None:
    """Ranks at random places of one common order of operations: somebody can always go on."""
    chosen = random.Random(3)
    for _ in range(300):
        size, num_groups = chosen.randint(2, 6), chosen.randint(1, 4)
        members = {
            group: sorted(chosen.sample(range(size), chosen.randint(2, size)))
            for group in range(num_groups)
        }
        order = [chosen.randrange(num_groups) for _ in range(12)]
        records = {rank: _at_random(rank, members, order, chosen) for rank in range(size)}
        blocked = {rank: each for rank, each in records.items() if each is not None}
        assert all(stuck_with(rank, blocked) == [] for rank in blocked)


def _at_random(
    rank: int, members: Mapping[int, Sequence[int]], order: Sequence[int], chosen: random.Random
) -> WaitRecord | None:
    mine = [place for place, group in enumerate(order) if rank in members[group]]
    if not mine:
        return None
    place = chosen.choice(mine)
    begun = {group: (order[: place + 1].count(group), 0) for group in members}
    group = order[place]
    others = [each for each in members[group] if each != rank]
    return record((begins(group, begun[group][0]), others), groups=begun)


def test_the_report_puts_ranks_that_do_the_same_in_one_line() -> None:
    saving = record((begins(0, 1), [1, 2]), call="shoal.save() at train.py:9")
    training = record((begins(1, 1), [0]), call="loss.backward() at train.py:7")
    text = report({0: saving, 1: training, 2: training})
    assert "  rank 0 in shoal.save() at train.py:9: waits for ranks 1, 2 in group 0\n" in text
    assert "  ranks 1, 2 in loss.backward() at train.py:7: wait for rank 0 in group 1\n" in text


def test_a_report_of_many_ranks_is_short() -> None:
    records = {
        rank: record((begins(rank, 1), [0]), call=f"world.recv() at a.py:{rank}")
        for rank in range(5000)
    }
    assert len(report(records)) < 4000


@pytest.mark.parametrize("ranks", [(2,), (0, 1), (0, 1, 2, 7), (1, 3, 5)])
def test_a_verdict_tells_every_rank_whether_it_is_meant(ranks: tuple[int, ...]) -> None:
    verdict = finding.decode_reason(finding.encode_reason(finding.Deadlock(ranks, "why: 1-2")))
    assert verdict == ([*ranks], "why: 1-2")
    assert finding.decode_reason("ValueError: DeadlockError of ranks 0, 1: no") is None

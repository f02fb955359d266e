"""Waits end: warnings that become rarer, then an error; both say what is waited for."""

import itertools

import pytest

from shoal.errors import DeadlineError
from shoal.system import deadline
from shoal.system.deadline import Deadline, joining_text, operation_text, pauses, wait_until


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(deadline.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(deadline.time, "sleep", self.pass_time)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def text(waited: float, what: str) -> str:
    return f"{what} for {waited:.0f} s"


def test_warnings_become_rarer_and_an_error_ends_the_wait(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limit = Deadline(100.0)
    for _ in range(100):
        limit.enforce(text, "tea")
        clock.pass_time(1.0)
    with pytest.raises(DeadlineError, match="tea for 100 s"):
        limit.enforce(text, "tea")
    assert [record.message for record in caplog.records] == [
        "still waiting: tea for 10 s",
        "still waiting: tea for 30 s",
        "still waiting: tea for 90 s",
    ]


def test_a_short_wait_warns_half_way(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    limit = Deadline(4.0)
    clock.pass_time(1.9)
    limit.enforce(text, "tea")
    assert not caplog.records
    clock.pass_time(0.1)
    limit.enforce(text, "tea")
    assert caplog.records


def test_a_wait_may_begin_later_than_its_deadline(clock: Clock) -> None:
    limit = Deadline(5.0)
    clock.pass_time(6.0)
    limit.enforce(text, "tea", since=clock.now - 1.0)
    with pytest.raises(DeadlineError):
        limit.enforce(text, "tea")


def test_wait_until(clock: Clock) -> None:
    assert wait_until(lambda: clock.now >= 102.0, 5.0, poll_s=0.5)
    assert not wait_until(lambda: False, 5.0, poll_s=0.5)
    assert 107.0 <= clock.now <= 108.0


def test_pauses_grow_to_the_longest() -> None:
    assert list(itertools.islice(pauses(1.0, 2.0), 4)) == [1.0, 1.5, 2.0, 2.0]


def test_texts_name_the_ranks() -> None:
    late = operation_text(1.5, "barrier", range(3), [2], lambda rank: f"line {rank}")
    assert late == (
        "barrier, for 1.5 s\n  arrived: ranks 0, 1; missing: rank 2\n  rank 2 was last in line 2"
    )
    assert "for ranks 1, 2 of 3 to join" in joining_text(1.0, 0, 3, lambda: [1, 2], "Why?")

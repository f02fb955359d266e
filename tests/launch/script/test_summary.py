"""Who failed first, and what is said about it."""

import pytest

from shoal.launch.script.summary import Ending, Record, first_failure, summarize


def record(time: float, *, primary: bool) -> Record:
    return Record(time, "ValueError", "boom", "Traceback", primary)


@pytest.mark.parametrize(
    ("endings", "first"),
    [
        ([Ending(0, 0, 1.0), Ending(1, 0, 2.0)], None),
        ([Ending(0, 1, 2.0), Ending(1, 1, 1.0)], 1),
        # An exception precedes the exit; a rank that was killed first is first all the same.
        ([Ending(0, 1, 2.0), Ending(1, 1, 9.0, record=record(1.0, primary=True))], 1),
        ([Ending(0, -9, 2.0), Ending(1, 1, 9.0, record=record(3.0, primary=True))], 0),
        # An echo is never the cause, unless there is nothing else.
        ([Ending(0, 1, 1.0, record=record(0.1, primary=False)), Ending(1, -9, 2.0)], 1),
        ([Ending(0, 1, 2.0, record=record(0.1, primary=False)), Ending(1, 0, 1.0)], 0),
    ],
)
def test_who_failed_first(endings: list[Ending], first: int | None) -> None:
    found = first_failure(endings)
    assert (None if found is None else found.rank) == first


def test_a_killed_rank_gets_a_hint() -> None:
    ending = Ending(0, -9, 1.0)
    assert "killed by SIGKILL" in summarize(ending, [ending])
    assert "out of memory" in summarize(ending, [ending])

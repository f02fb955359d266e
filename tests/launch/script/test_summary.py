"""Who failed first, and what is said about it."""

import pytest

from shoal.launch.script.summary import STOPPED, Ending, Record, first_failure, summarize


def record(time: float, *, primary: bool, culprit: int | None = None) -> Record:
    return Record(time, "ValueError", "boom", "Traceback", primary, culprit)


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
        # A rank that left with 0 while they waited for it comes before them.
        ([Ending(0, 1, 2.0, record=record(0.1, primary=False, culprit=1)), Ending(1, 0, 1.0)], 1),
        ([Ending(0, 1, 2.0, record=record(0.1, primary=False, culprit=5)), Ending(1, 0, 1.0)], 0),
        # So is one that the launcher ended for another's failure, but not one that was stopped.
        (
            [
                Ending(0, 1, 1.0, record=record(1.0, primary=False)),
                Ending(1, -15, 2.0, fate="late"),
            ],
            0,
        ),
        (
            [
                Ending(0, 1, 1.0, record=record(1.0, primary=False)),
                Ending(1, -9, 2.0, fate=STOPPED),
            ],
            1,
        ),
    ],
)
def test_who_failed_first(endings: list[Ending], first: int | None) -> None:
    found = first_failure(endings)
    assert (None if found is None else found.rank) == first


def test_a_killed_rank_gets_a_hint() -> None:
    ending = Ending(0, -9, 1.0)
    assert "killed by SIGKILL" in summarize(ending, [ending])
    assert "out of memory" in summarize(ending, [ending])


ECHO = """Traceback (most recent call last):
  File "train.py", line 8, in <module>
    world.barrier()
shoal.errors.PeerError: rank 2 failed: ValueError: boom (train.py:7)
  while this rank was in barrier() at train.py:8, for {seconds} s
  missing: rank 2
"""


def test_equal_tracebacks_are_folded() -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: boom\n'
    endings = [Ending(rank, 1, 1.0 + rank, held=text) for rank in range(5)]
    summary = summarize(endings[0], endings)
    assert summary.count("ValueError: boom") == 1
    assert summary.endswith("ranks 1-4: exit code 1, with the same traceback")


def test_echoes_are_folded_to_who_and_where() -> None:
    first = Ending(2, 1, 1.0, record=record(0.5, primary=True))
    echoes = [Ending(rank, 1, 2.0, held=ECHO.format(seconds=rank)) for rank in (0, 1, 3)]
    summary = summarize(first, [first, *echoes])
    assert summary.count("PeerError") == 1
    assert "ranks 0, 1, 3: exit code 1" in summary
    assert "while this rank was in barrier() at train.py:8" in summary
    assert "missing" not in summary


def test_one_that_was_stopped_is_called_that() -> None:
    ending = Ending(1, -9, 1.0, fate=STOPPED)
    assert "rank 1 failed first (stopped (SIGSTOP)" in summarize(ending, [ending])
    assert "out of memory" not in summarize(ending, [ending])

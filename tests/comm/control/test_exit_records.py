"""What ranks leave behind when they exit, and how the last one compares it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shoal.comm.control.exit_records import ExitRecords
from shoal.errors import MismatchError


class Steps:
    def __init__(self, count: int) -> None:
        self.count = count

    def exit_record(self) -> str:
        return str(self.count)

    def check_exit_records(self, records: Mapping[int, str]) -> None:
        for rank, text in records.items():
            if int(text) != self.count:
                raise MismatchError(f"rank {rank} made {text} steps")


def records(*all_steps: Steps) -> ExitRecords:
    found = ExitRecords()
    for steps in all_steps:
        found.add([0, 1, 2], steps)
    return found


def test_the_last_rank_compares_with_all_that_left_before() -> None:
    steps = [Steps(5), Steps(5), Steps(6)]
    left = [records(each) for each in steps]
    notes = ["", left[1].note(), left[2].note()]
    assert left[0].find(notes.__getitem__, [1, 2]) == []
    with pytest.raises(MismatchError, match="rank 2 made 6 steps"):
        left[0].check()
    left[0].check()  # once


def test_a_rank_that_has_left_no_record_is_missing() -> None:
    steps = Steps(1)
    assert records(steps).find(lambda rank: "barrier() at a.py:1", [1, 2]) == [1, 2]


def test_what_is_gone_or_too_long_is_not_recorded() -> None:
    gone = records(Steps(1))
    assert gone.note() == ""
    many = [Steps(1) for _ in range(100)]
    assert records(*many).note() == ""


@pytest.mark.parametrize("end", [-3, None], ids=["shorter", "longer"])
def test_a_note_that_is_being_written_is_read_again(end: int | None) -> None:
    own, other = Steps(1), Steps(2)
    note, mine = records(other).note(), records(own)
    torn = note[:end] if end else note + "all_reduce() at a.py:1"
    assert mine.find(lambda rank: torn, [1]) == [1]
    assert mine.find(lambda rank: note, [1]) == []
    with pytest.raises(MismatchError, match="rank 1 made 2 steps"):
        mine.check()

"""Records as bytes."""

from __future__ import annotations

import pytest

from shoal.comm.control.deadlock.record import (
    MOST_RECORD_BYTES,
    OPERATION,
    RECV,
    Awaited,
    LongWait,
    RankProgress,
    WaitRecord,
)

WAIT = LongWait(4, Awaited(RECV, 2, 9, 5), (1, 3), "group 2 of ranks 0, 1, 3")


def test_there_and_back() -> None:
    progress = RankProgress({0: (17, 12), 2: (3, 3)}, {(2, "recv", 3, 5): 9, (0, "send", 1, 0): 2})
    record = WaitRecord([WAIT], progress, "world.recv() at müll.py:3", 77)
    assert WaitRecord.decode(record.encode()) == record


def test_equal_records_have_equal_bytes() -> None:
    one = RankProgress({0: (1, 1), 5: (2, 2)}, {(0, "send", 1, 0): 1, (0, "recv", 1, 0): 1})
    two = RankProgress({5: (2, 2), 0: (1, 1)}, {(0, "recv", 1, 0): 1, (0, "send", 1, 0): 1})
    assert WaitRecord([WAIT], one, "").encode() == WaitRecord([WAIT], two, "").encode()


def test_messages_are_left_out_when_they_are_too_many() -> None:
    messages = {(0, "send", 1, tag): 1 for tag in range(10_000)}
    data = WaitRecord([WAIT], RankProgress({0: (1, 1)}, messages), "").encode()
    assert 0 < len(data) <= MOST_RECORD_BYTES
    found = WaitRecord.decode(data)
    assert found is not None
    assert found.progress.messages is None
    assert found.progress.has_begun(Awaited(RECV, 0, 5), 1), "unknown is no proof"
    assert not found.progress.has_begun(Awaited(OPERATION, 0, 2), 1)


def test_what_does_not_fit_is_not_shown() -> None:
    groups = dict.fromkeys(range(5000), (1 << 40, 1 << 40))
    assert WaitRecord([WAIT], RankProgress(groups, {}), "").encode() == b""


@pytest.mark.parametrize("data", [b"", b"[", b"[1]", b"{}", b"\xff\x00", b"[[1],[],null,0,0]"])
def test_what_is_no_record(data: bytes) -> None:
    assert WaitRecord.decode(data) is None

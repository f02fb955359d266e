"""Frames: what a stranger can do to them is end the conversation."""

from __future__ import annotations

import pytest

from shoal.meeting.wire import LONGEST_REQUEST_BYTES, Wire, WireError

KEY = b"k" * 32


def pair(key: bytes | None = KEY) -> tuple[Wire, Wire]:
    limit = LONGEST_REQUEST_BYTES
    return Wire("guest", limit, key), Wire("server", limit, key)


@pytest.mark.parametrize("key", [None, KEY])
def test_messages_arrive_however_they_are_cut(key: bytes | None) -> None:
    guest, server = pair(key)
    messages = [{"kind": "gather", "data": "x" * 1000}, {}, [1, None, "two"]]
    stream = b"".join(guest.encode(message) for message in messages)
    heard = [each for at in range(0, len(stream), 7) for each in server.feed(stream[at : at + 7])]
    assert heard == messages
    assert guest.feed(server.encode({"back": 1})) == [{"back": 1}]


def test_a_changed_byte_is_noticed() -> None:
    for at in range(4, 60, 5):
        guest, server = pair()
        frame = bytearray(guest.encode({"kind": "failed", "rank": 1}))
        frame[at] ^= 1
        with pytest.raises(WireError):
            server.feed(bytes(frame))


def test_a_frame_counts_once_in_its_place_and_direction() -> None:
    guest, server = pair()
    first, second = guest.encode({"n": 1}), guest.encode({"n": 2})
    with pytest.raises(WireError, match="does not come from"):
        server.feed(second)
    guest, server = pair()
    first = guest.encode({"n": 1})
    assert server.feed(first) == [{"n": 1}]
    with pytest.raises(WireError, match="does not come from"):
        server.feed(first)
    guest, _ = pair()
    with pytest.raises(WireError, match="does not come from"):
        guest.feed(first)


def test_nothing_is_kept_of_a_frame_that_is_too_long() -> None:
    _, server = pair()
    with pytest.raises(WireError, match="announces"):
        server.feed(b"\xff\xff\xff\xff")


def test_another_language_is_no_crash() -> None:
    _, server = pair(None)
    with pytest.raises(WireError, match="another language"):
        server.feed(b"\x02\0\0\0{]")
    _, server = pair(None)
    deep = b"[" * 100_000
    with pytest.raises(WireError, match="another language"):
        server.feed(len(deep).to_bytes(4, "little") + deep)

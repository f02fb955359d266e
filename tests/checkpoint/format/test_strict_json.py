"""JSON texts: what is written can be read, and what would take too much memory is neither."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.checkpoint.format import strict_json


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, "text"]}, {"many": [[]] * 100_000}])
def test_what_is_written_is_read(value: Any) -> None:
    assert strict_json.parse(strict_json.encode(value)) == value


def test_more_empty_lists_than_are_harmless() -> None:
    """An error when it is saved, not when it is loaded."""
    with pytest.raises(ValueError, match="next to nothing in them"):
        strict_json.encode({"many": [[]] * (1 << 20)})
    strict_json.encode({"many": [[100, 200]] * (1 << 20)})


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[NaN]", b"[" + b"1" * 500 + b"]", b"{"])
def test_what_honest_writers_do_not_write(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.parse(text)

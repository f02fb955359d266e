"""Plain values as JSON and back; texts that would take too much memory are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.format import plain_json

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_values_survive(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    again = plain_json.decode(plain_json.encode(value, "x", tensors.__setitem__), tensors)
    assert repr(again) == repr(value)  # so that nan is nan, and 1 is not True


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, "text"]}, {"many": [[]] * 100_000}])
def test_what_is_written_is_read(value: Any) -> None:
    assert plain_json.parse(plain_json.to_text(value)) == value


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[NaN]", b"[" + b"1" * 500 + b"]", b"{"])
def test_what_honest_writers_do_not_write(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        plain_json.parse(text)


def test_references_are_found_in_order_at_any_depth() -> None:
    value: Any = {"a": [{"$tensor": "1"}, {"b": {"$tuple": [{"$tensor": "2"}]}}], "c": 1}
    assert plain_json.references([value, {"$tensor": "3"}]) == ["1", "2", "3"]
    assert plain_json.references({"$tensor": {"dtype": "int8", "shape": [], "data": "00"}}) == []
    for _ in range(5000):  # deeper than calls may be nested
        value = [value]
    assert plain_json.references(value) == ["1", "2"]

"""Plain values as JSON, and back."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.format import values

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
    again = values.decode(values.encode(value, "x", tensors.__setitem__), tensors)
    assert repr(again) == repr(value)  # so that nan is nan, and 1 is not True

"""What ranks show each other of an operation, the error if they differ, and flat memory."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from shoal.comm.operation.base import Header, check_equal, flatten, mismatch, spec
from shoal.errors import MismatchError

headers = st.builds(
    Header,
    signature=st.text(st.characters(codec="utf-8"), max_size=200),
    meta=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40).map(tuple),
    wire=st.binary(max_size=100),
    site=st.text(st.characters(codec="ascii"), max_size=240),
)


@hypothesis.given(headers)
def test_a_header_survives_the_way(header) -> None:
    assert Header.decode(header.encode()) == header


@hypothesis.given(st.text(st.characters(codec="utf-8"), min_size=100, max_size=400))
def test_of_a_long_site_the_end_is_kept(site) -> None:
    decoded = Header.decode(Header("barrier()", (), b"", site).encode())
    assert len(decoded.site.encode()) <= 3 * 240
    assert decoded.signature == "barrier()"
    assert site.endswith(decoded.site.lstrip("\ufffd")[-50:])


def test_a_mismatch_names_every_call_and_where_it_was_made() -> None:
    shown = [
        Header("all_reduce(float32[3], op=sum)", (), b"", "a.py:1"),
        Header("all_reduce(float32[4], op=sum)", (), b"", "a.py:1"),
        Header("all_reduce(float32[3], op=sum)", (), b"", "a.py:1"),
    ]
    check_equal(shown[::2], [4, 8], 1)
    with pytest.raises(MismatchError) as caught:
        check_equal(shown, [4, 6, 8], 17)
    text = str(caught.value)
    assert "ranks 4, 8: all_reduce(float32[3], op=sum) at a.py:1" in text
    assert "rank 6: all_reduce(float32[4], op=sum) at a.py:1" in text
    assert "17" in text


def test_a_mismatch_of_many_ranks_is_short() -> None:
    shown = [Header("barrier()", (), b"", "a.py:1")] * 100
    assert "... (100 ranks)" in str(mismatch(shown, range(100), "odd"))


def test_specs_read_like_torch() -> None:
    assert spec(torch.float32, (3, 5)) == "float32[3, 5]"
    assert spec(torch.bool, ()) == "bool[]"


def test_what_transports_see_is_flat_and_dense() -> None:
    """A single element of a row keeps that row's stride, and cannot be viewed as bytes then."""
    for tensor in (torch.zeros(3, 2)[:1, 1], torch.zeros(4, 2)[0, 1], torch.zeros(3, 4).t()):
        flat = flatten(tensor)
        assert flat.stride() == (1,)
        assert flat.view(torch.uint8).numel() == 4 * tensor.numel()
    row = torch.zeros(3)
    assert flatten(row).data_ptr() == row.data_ptr()
    assert flatten(torch.tensor([True])).dtype is torch.uint8

"""The pure parts: sharing out, headers, reductions."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from shoal.comm.operation import flatten
from shoal.comm.operation.header import Header, check_equal, mismatch, spec
from shoal.comm.operation.partition import check_sizes, offsets, split_sizes
from shoal.comm.operation.reduction import ReduceOp, check_dtype, reduce_into
from shoal.errors import MismatchError
from shoal.system.site import call_site

# Sharing out ----------------------------------------------------------------------------


@hypothesis.given(length=st.integers(0, 10**6), num_parts=st.integers(1, 100))
def test_parts_are_even_and_the_first_are_longer(length, num_parts) -> None:
    sizes = split_sizes(length, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == length
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@hypothesis.given(st.lists(st.integers(0, 100)))
def test_offsets_are_where_parts_begin(sizes) -> None:
    starts = offsets(sizes)
    assert starts[0] == 0
    assert starts[-1] == sum(sizes)
    assert [after - before for before, after in itertools.pairwise(starts)] == sizes


@pytest.mark.parametrize("sizes", [[3], [3, 3, 3], [2, 3], [7, -1], []])
def test_sizes_that_do_not_add_up_are_refused(sizes) -> None:
    with pytest.raises(ValueError, match=r"2 non-negative numbers that add up to 6 rows; got"):
        check_sizes(sizes, 6, 2)
    assert check_sizes((6, 0), 6, 2) == [6, 0]


# Headers --------------------------------------------------------------------------------

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


def test_a_call_site_is_the_users() -> None:
    assert call_site().startswith(f"{__file__}:")


def test_what_torch_calls_for_the_user_is_the_users_call() -> None:
    """A hook in backward: the line of ``loss.backward()`` helps, one of torch does not."""
    of_torch: dict[str, Any] = {"call_site": call_site}
    exec(compile("def hook(): return call_site()", torch.__file__, "exec"), of_torch)
    assert of_torch["hook"]().startswith(f"{__file__}:")


# Flat views ------------------------------------------------------------------------------


def test_what_transports_see_is_flat_and_dense() -> None:
    """A single element of a row keeps that row's stride, and cannot be viewed as bytes then."""
    for tensor in (torch.zeros(3, 2)[:1, 1], torch.zeros(4, 2)[0, 1], torch.zeros(3, 4).t()):
        flat = flatten(tensor)
        assert flat.stride() == (1,)
        assert flat.view(torch.uint8).numel() == 4 * tensor.numel()
    row = torch.zeros(3)
    assert flatten(row).data_ptr() == row.data_ptr()
    assert flatten(torch.tensor([True])).dtype is torch.uint8


# Reductions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "op"),
    [("sum", "sum"), ("AVG", "average"), ("mean", "average"), ("prod", "product"), ("Max", "max")],
)
def test_reduce_operations_have_plain_names(name, op) -> None:
    assert ReduceOp.parse(name) is ReduceOp(op)
    assert ReduceOp.parse(ReduceOp(op)) is ReduceOp(op)


@pytest.mark.parametrize("name", ["median", "", "sums"])
def test_an_unknown_operation_is_refused_with_the_choices(name) -> None:
    with pytest.raises(ValueError, match=f"sum, average, min, max, product; got '{name}'"):
        ReduceOp.parse(name)


REFERENCE = {
    "sum": lambda x: x.sum(0),
    "average": lambda x: x.sum(0) / x.shape[0],
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
    "product": lambda x: x.prod(0),
}


@hypothesis.given(
    op=st.sampled_from(list(ReduceOp)),
    count=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    into=st.integers(-1, 5),
    seed=st.integers(0, 100),
)
def test_reduce_into(op, count, dtype, into, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(9, generator=generator).to(dtype) for _ in range(count)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    exact = REFERENCE[op.value](torch.stack(inputs).to(torch.float64))
    untouched = [value.clone() for value in inputs]
    out = inputs[into] if 0 <= into < count else torch.empty(9, dtype=dtype)
    reduce_into(op, inputs, out)
    # Sixteen bits are rounded once, at the end, from sums in thirty-two.
    tolerance = (
        8 * torch.finfo(wide).eps * torch.stack(untouched).double().abs().sum(0).clamp(min=1)
    )
    rounding = torch.finfo(dtype).eps * exact.abs()
    assert bool(((out.double() - exact).abs() <= tolerance + rounding).all())
    for index, value in enumerate(inputs):
        assert value is out or torch.equal(value, untouched[index])


def test_a_sum_of_sixteen_bit_values_is_rounded_once() -> None:
    small, large = torch.tensor([1.0]), torch.tensor([256.0])
    inputs = [value.bfloat16() for value in (large, small, small, small, small)]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(ReduceOp.SUM, inputs, out)
    assert out.item() == 260.0  # one by one, each 1 would have been lost


@pytest.mark.parametrize(
    ("op", "dtype", "advice"),
    [
        ("average", torch.int64, "use op='sum' and divide"),
        ("sum", torch.bool, "op='max' for any"),
        ("min", torch.complex64, "no order"),
        ("sum", torch.float8_e5m2, "convert the tensor"),
    ],
)
def test_a_pair_without_a_meaning_is_refused_with_advice(op, dtype, advice) -> None:
    with pytest.raises(TypeError, match=advice):
        check_dtype(ReduceOp(op), dtype)

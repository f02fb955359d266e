"""Objects as bytes: what comes back, what needs pickle, what a stranger can do."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct

import cloudpickle
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from shoal.comm.objects import encoding
from shoal.errors import UntrustedPickleError

LENGTH = struct.Struct("<Q")
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.booleans()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.binary())
    ),
    max_leaves=20,
)


@hypothesis.given(values)
def test_plain_data_needs_no_pickle(value) -> None:
    data = encoding.encode(value)
    decoded = encoding.decode(data, allow_pickle=False)
    assert decoded == value
    assert _types(decoded) == _types(value)


def _types(value):
    """The kinds of everything inside: True is not 1, a tuple is no list."""
    if isinstance(value, list | tuple):
        return type(value), [_types(item) for item in value]
    if isinstance(value, dict):
        return dict, [(_types(k), _types(v)) for k, v in value.items()]
    return type(value)


@pytest.mark.parametrize(
    "value",
    [math.inf, -0.0, 5e-324, 10**5000, -(1 << 40000), "\ud800", {"f": "1.0"}, {"dict": 1}],
    ids=range(8),
)
def test_odd_plain_values(value) -> None:
    decoded = encoding.decode(encoding.encode(value), allow_pickle=False)
    assert decoded == value
    assert str(type(decoded)) == str(type(value))
    if isinstance(value, float):
        assert math.copysign(1, decoded) == math.copysign(1, value)
    assert math.isnan(encoding.decode(encoding.encode(math.nan), allow_pickle=False))


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.uint16,
]  # fmt: skip


@hypothesis.given(
    shape=st.lists(st.integers(0, 3), max_size=4),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["whole", "transposed", "part"]),
)
def test_tensors_need_no_pickle(shape, dtype, layout) -> None:
    tensor = torch.randint(0, 3, [*shape, 2]).to(dtype)
    tensor = (
        tensor[..., 1]
        if layout == "part"
        else tensor.mT
        if layout == "transposed" and shape
        else tensor
    )
    decoded = encoding.decode(encoding.encode([tensor]), allow_pickle=False)[0]
    assert type(decoded) is torch.Tensor
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
    assert _raw(decoded) == _raw(tensor)


def _raw(tensor):
    fresh = torch.empty(tensor.numel(), 1, dtype=tensor.dtype).copy_(tensor.reshape(-1, 1))
    return fresh.view(torch.uint8).numpy().tobytes()


class Anything:
    def __init__(self, value):
        self.value = value


NEED_PICKLE = [
    Anything(1),
    [1, (Anything(2),)],
    np.arange(3),
    np.float32(1),
    torch.nn.Parameter(torch.ones(2)),
    torch.ones(2, requires_grad=True),
    torch.eye(2).to_sparse(),
    torch.float32,
    range(3),
    lambda: 5,
    os.path.join,
]


@pytest.mark.parametrize("value", NEED_PICKLE, ids=lambda value: type(value).__name__)
def test_what_is_more_than_plain_is_pickled_and_refused_from_strangers(value) -> None:
    data = encoding.encode(value)
    assert type(encoding.decode(data, allow_pickle=True)) is type(value)
    with pytest.raises(UntrustedPickleError, match="SHOAL_TOKEN"):
        encoding.decode(data, allow_pickle=False)


def test_an_object_that_contains_itself() -> None:
    knot: list[object] = [1]
    knot.append(knot)
    decoded = encoding.decode(encoding.encode(knot), allow_pickle=True)
    assert decoded[1] is decoded


# Strangers ------------------------------------------------------------------------------


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def plain(tree, *blobs):
    """Bytes that look like ours, around any tree."""
    pieces = [json.dumps(tree).encode(), *blobs]
    return b"P" + b"".join(LENGTH.pack(len(piece)) + piece for piece in pieces)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_strangers_bytes_run_no_code(tmp_path) -> None:
    path = str(tmp_path / "touched")
    payload = pickle.dumps(Touch(path))
    attempts = [
        b"C" + payload,
        payload,
        plain({"bytes": 0}, payload),
        plain({"tensor": ["float32", [1], 0]}, payload),
        plain({"object": [payload.hex()]}),
        plain({"__reduce__": ["os.system", "touch"]}),
        plain({"tensor": ["load", [1], 0]}, payload),
        plain({"tensor": ["ops.load_library", [0], 0]}, b""),
        plain({"eval": ["1"]}),
    ]
    for data in attempts:
        try:
            value = encoding.decode(data, allow_pickle=False)
        except Exception:
            continue
        assert isinstance(value, bytes)
    assert not os.path.exists(path)
    cloudpickle.loads(payload).close()
    assert os.path.exists(path)  # the trap works


@hypothesis.given(st.binary(max_size=200))
def test_noise_is_an_error_or_plain(data) -> None:
    hypothesis.assume(data[:1] != b"C")
    try:
        encoding.decode(b"P" + data, allow_pickle=False)
    except UntrustedPickleError:
        raise
    except Exception:
        return


@pytest.mark.parametrize("shape", [[10**12], [3], [1 << 62, 4]])
def test_a_tensor_that_promises_more_than_it_brings_is_refused(shape) -> None:
    for blob in (b"", b"\x00" * 8):
        with pytest.raises((RuntimeError, ValueError)):
            encoding.decode(plain({"tensor": ["float32", shape, 0]}, blob), allow_pickle=False)


def test_a_dtype_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="dtype that there is not: 'load'"):
        encoding.decode(plain({"tensor": ["load", [1], 0]}, b"1234"), allow_pickle=False)


def test_pickles_of_ours_are_cloudpickles() -> None:
    local = 3
    function = encoding.decode(encoding.encode(lambda x: x + local), allow_pickle=True)
    assert function(4) == 7
    assert io.BytesIO(encoding.encode(1)).read(1) == b"P"

"""Objects as bytes: plain data and tensors as such, anything else only with pickle.

Plain data (numbers, texts, bytes, lists, tuples, dicts, sets, None) and tensors are written
in a format of our own that can do nothing but rebuild them. What is more than that is
pickled, and since unpickling runs code, only what carries a proof is read: see `seals.py`.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from shoal.errors import UntrustedPickleError
from shoal.torch_support.memory import as_bytes

PICKLED = b"C"
_PLAIN = b"P"
_LENGTH = struct.Struct("<Q")
# Python refuses to write much longer ones as decimals.
_LONGEST_INT_BITS = 1024


class _NotPlain(Exception):
    """Raised inside when a value needs pickle."""


def encode(value: Any) -> bytes:
    """The value as bytes; plain where that is possible."""
    blobs: list[bytes] = []
    try:
        text = json.dumps(_to_json(value, blobs)).encode()
    except (_NotPlain, RecursionError):  # or an object that contains itself
        pickled: bytes = cloudpickle.dumps(value)
        return PICKLED + pickled
    parts = [_PLAIN, _LENGTH.pack(len(text)), text]
    for blob in blobs:
        parts += (_LENGTH.pack(len(blob)), blob)
    return b"".join(parts)


def decode(data: bytes, *, allow_pickle: bool) -> Any:
    """The inverse of `encode`; refuses pickles unless they are known to be a rank's own."""
    if data[:1] == PICKLED:
        if not allow_pickle:
            raise UntrustedPickleError(
                "a peer sent an object that needs pickle, which can run any code, and this world "
                "spans hosts without a shared secret. Send plain data or tensors, or set "
                "SHOAL_TOKEN to the same secret on every host to vouch for all ranks."
            )
        return cloudpickle.loads(data[1:])
    pieces = _pieces(data)
    return _from_json(json.loads(pieces[0]), pieces[1:])


def _pieces(data: bytes) -> list[bytes]:
    pieces, position = [], 1
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        pieces.append(data[position : position + length])
        position += length
    return pieces


def _to_json(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _LONGEST_INT_BITS else {"int": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is list:
        return [_to_json(item, blobs) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_to_json(item, blobs) for item in value]}
    if kind is dict:
        items = [[_to_json(k, blobs), _to_json(v, blobs)] for k, v in value.items()]
        return {"dict": items}
    if kind is bytes:
        return {"bytes": _keep(value, blobs)}
    if kind is Tensor and value.layout is torch.strided and not value.requires_grad:
        return _tensor_to_json(value, blobs)
    raise _NotPlain


def _keep(blob: bytes, blobs: list[bytes]) -> int:
    blobs.append(blob)
    return len(blobs) - 1


def _tensor_to_json(tensor: Tensor, blobs: list[bytes]) -> Any:
    if tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise _NotPlain
    flat = torch.empty(tensor.numel(), 1, dtype=tensor.dtype).copy_(tensor.reshape(-1, 1))
    blob = flat.view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"tensor": [dtype, list(tensor.shape), _keep(blob, blobs)]}


def _from_json(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "dict":
        return {_from_json(k, blobs): _from_json(v, blobs) for k, v in content}
    if tag == "f":
        return float.fromhex(content)
    if tag == "int":
        return int(content, 16)
    if tag == "bytes":
        return blobs[content]
    if tag == "tensor":
        return _tensor_from_json(content, blobs)
    items = [_from_json(item, blobs) for item in content]
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)


def _tensor_from_json(content: Any, blobs: list[bytes]) -> Tensor:
    name, shape, index = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a peer sent a tensor of a dtype that there is not: {name!r}")
    if not blobs[index]:
        return torch.empty(0, dtype=dtype).view(shape)
    return as_bytes(bytearray(blobs[index])).view(dtype).view(shape)

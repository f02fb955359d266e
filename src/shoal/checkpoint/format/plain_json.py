"""Plain values as JSON, and JSON from strangers: no key twice, no explosion of memory.

Numbers, texts, lists and dicts with text for keys are written as JSON has them. The rest of the
plain types is a dict with one key that begins with "$". Small tensors are written out, larger ones
go into the files and leave their key behind. Anything else is refused: only pickle could hold it,
and reading a pickle runs code.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.format.json_budget import check_memory
from shoal.torch_support.dtypes import dtype_called, dtype_name
from shoal.torch_support.memory import as_memory

_SMALL_BYTES = 64
_DEEPEST = 100
_LARGE = 1 << 1024

TensorSink = Callable[[str, Tensor], str]
"""Takes what a tensor is called and the tensor, for the files; returns its key there."""


def encode(value: Any, path: str, put: TensorSink) -> Any:
    """The value as JSON; ``put`` takes tensors inside, whose keys begin with the value's path.

    Raises:
        TypeError: If something in it is neither plain nor a tensor.
    """
    if path.count("/") > _DEEPEST:
        raise TypeError(f"{path[:100]}... is nested too deep, or contains itself")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _encode_number(value)
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, put)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, put)
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(item, f"{path}/{index}", put) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which only pickle could "
        "save, and reading a pickle can run any code: save numbers, texts, lists, dicts and "
        "tensors, for example its state_dict()"
    )


def _encode_number(value: float) -> Any:
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGE else {"$integer": hex(value)}
    return float(value) if math.isfinite(value) else {"$float": repr(float(value))}


def _encode_tensor(value: Tensor, path: str, put: TensorSink) -> Any:
    dtype = checked_dtype(value, path)
    shape = list(value.shape)
    if value.nbytes > _SMALL_BYTES:
        return {"$tensor": put(path, value)}
    return {"$tensor": {"dtype": dtype, "shape": shape, "data": bytes(as_memory(value)).hex()}}


def checked_dtype(value: Tensor, path: str) -> str:
    """The dtype's name, if the tensor is one that files can hold.

    Raises:
        TypeError: If it is not.
    """
    if value.is_meta or value.is_nested or value.layout is not torch.strided:
        found = "on the meta device" if value.is_meta else "sparse or nested"
        raise TypeError(f"{path} is a tensor that is {found}: only plain tensors can be saved")
    return dtype_name(value.dtype, path)


def _encode_mapping(value: Mapping[Any, Any], path: str, put: TensorSink) -> Any:
    is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if is_plain and not isinstance(value, Counter):
        return {str(key): encode(item, f"{path}/{key}", put) for key, item in value.items()}
    pairs = [
        [encode(key, f"{path}/{index}k", put), encode(item, f"{path}/{index}", put)]
        for index, (key, item) in enumerate(value.items())
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def references(value: Any) -> list[str]:
    """The keys of the tensors that a value needs from the files."""
    found: list[str] = []
    waiting = [value]  # instead of calls, whose lists would be copied once for each level
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += reversed(each)
        elif isinstance(each, dict) and isinstance(each.get("$tensor"), str):
            found.append(each["$tensor"])
        elif isinstance(each, dict):
            waiting += reversed(each.values())
    return found


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`; ``tensors`` has those of `references`.

    Raises:
        ValueError: If it is not what `encode` writes.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key.startswith("$"):
            return _decode_tagged(key, content, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    if tag == "$tensor":
        return tensors[content] if isinstance(content, str) else _decode_tensor(content)
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "$integer" and isinstance(content, str):
        return int(content, 16)
    if tag == "$bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if tag in ("$dict", "$counter", "$tuple", "$set") and isinstance(content, list):
        return _decode_collection(tag, content, tensors)
    raise ValueError(f"{tag[:50]!r} with {str(content)[:50]!r} is no value")


def _decode_collection(tag: str, content: list[Any], tensors: Mapping[str, Tensor]) -> Any:
    items = [decode(item, tensors) for item in content]
    try:
        if tag in ("$dict", "$counter"):
            pairs = {key: item for key, item in items}  # noqa: C416 - exactly two of each
            return Counter(pairs) if tag == "$counter" else pairs
        return tuple(items) if tag == "$tuple" else set(items)
    except TypeError as error:
        raise ValueError(f"{tag} cannot be made: {error}") from None


def _decode_tensor(content: Any) -> Tensor:
    if not isinstance(content, dict) or content.keys() != {"dtype", "shape", "data"}:
        raise ValueError("a tensor needs dtype, shape and data")
    dtype, shape = dtype_called(content["dtype"]), content["shape"]
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise ValueError("a tensor has no proper shape")
    data = bytes.fromhex(content["data"]) if isinstance(content["data"], str) else b""
    if len(data) > _SMALL_BYTES or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {str(shape)[:50]} cannot have {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


_MOST_DIGITS = 400


def to_text(value: Any, record: bytes = b"") -> bytes:
    """A JSON text that `parse` takes.

    Raises:
        ValueError: If `parse` would refuse it.
    """
    text = json.dumps(value, allow_nan=False).encode()
    check_memory(text, record)
    return text


def parse(data: bytes, record: bytes = b"") -> Any:
    """The value of a JSON text, of which ``record`` tells the size; see `check_memory`.

    Raises:
        ValueError: If it is none, or is not what honest writers write.
    """
    check_memory(data, record)
    text = data.decode("utf-8")
    del data  # one of the two is enough
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError("lists and objects are nested too deep") from None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value can be a size or an offset."""
    return type(value) is int and 0 <= value < 2**63


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"the key {_repeated(pairs)[:200]!r} is there twice")
    return result


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return key


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)

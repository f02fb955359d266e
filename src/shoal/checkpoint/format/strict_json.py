"""JSON from strangers: no key twice, no other numbers than JSON's, no explosion of memory."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn, TypeGuard

# Lists and objects take ten times the memory of their shortest text. What shoal and safetensors
# write has longer ones.
_BYTES_A_CONTAINER = 6
_FREE_CONTAINERS = 256
_MOST_DIGITS = 400


def encode(value: Any) -> bytes:
    """A JSON text that `parse` takes: many short lists are made up for with spaces at the end."""
    text = json.dumps(value, allow_nan=False).encode()
    missing = _BYTES_A_CONTAINER * _num_containers(text) - len(text)
    return text[:-1] + b" " * max(missing, 0) + text[-1:]


def _num_containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def parse(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: If it is none, or is not what honest writers write.
    """
    containers = _num_containers(data)
    if containers > _FREE_CONTAINERS + len(data) // _BYTES_A_CONTAINER:
        raise ValueError(f"{containers} lists and objects in {len(data)} bytes")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError("lists and objects are nested too deep") from None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it can be a size or a position."""
    return type(value) is int and 0 <= value < 2**63


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:200]!r} is there twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)

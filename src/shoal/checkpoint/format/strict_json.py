"""JSON from strangers: no key twice, no other numbers than JSON's, no explosion of memory."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn, TypeGuard

# A list or object takes up to twenty times the memory of its shortest text, "[],". So many of them
# are harmless; more must have something in them.
_HARMLESS_CONTAINERS = 1 << 20
_LEAST_BYTES_PER_CONTAINER = 6
_MOST_DIGITS = 400


def encode(value: Any) -> bytes:
    """A JSON text that `parse` takes.

    Raises:
        ValueError: If `parse` would refuse it.
    """
    text = json.dumps(value, allow_nan=False).encode()
    _check_containers(text)
    return text


def parse(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: If it is none, or is not what honest writers write.
    """
    _check_containers(data)
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
    """Whether a value can be a size or an offset."""
    return type(value) is int and 0 <= value < 2**63


def _check_containers(data: bytes) -> None:
    count = data.count(b"[") + data.count(b"{")
    if count > max(_HARMLESS_CONTAINERS, len(data) // _LEAST_BYTES_PER_CONTAINER):
        raise ValueError(
            f"{count} lists and objects with next to nothing in them; a tensor has room for that"
        )


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

"""Codecs by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.compression.codec import Codec
from shoal.compression.dense import Cast, Identity, Quantize, Sign
from shoal.compression.low_rank import LowRank
from shoal.compression.sparse import RandomK, TopK

_PLAIN: dict[str, Callable[[], Codec]] = {
    "none": Identity,
    "fp16": lambda: Cast(torch.float16),
    "bf16": lambda: Cast(torch.bfloat16),
    "int8": lambda: Quantize(8),
    "int4": lambda: Quantize(4),
    "sign": Sign,
}
_WITH_NUMBER: dict[str, Callable[[str], Codec]] = {
    "topk": lambda number: TopK(_part(number)),
    "randomk": lambda number: RandomK(_part(number)),
    "powersgd": lambda number: LowRank(_whole(number)),
}
_EXAMPLES = (*_PLAIN, "topk:0.01", "randomk:0.01", "powersgd:2")


def _whole(number: str) -> int:
    if not number.isdecimal():
        raise ValueError(f"the rank of a matrix is a whole number from 1 on; got {number!r}")
    return int(number)


def _part(number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise ValueError(
            f"what is kept is a part of the whole, such as 0.01; got {number!r}"
        ) from None


def parse(text: str | Codec) -> Codec:
    """The codec of a name; a codec is what it is.

    Example:
        >>> parse("topk:0.01")
        TopK(ratio=0.01)
    """
    if isinstance(text, Codec):
        return text
    if not isinstance(text, str):
        raise TypeError(f"compression must be a name or a shoal.compression.Codec; got {text!r}")
    name, colon, number = text.partition(":")
    try:
        if not colon and name in _PLAIN:
            return _PLAIN[name]()
        if colon and name in _WITH_NUMBER:
            return _WITH_NUMBER[name](number)
    except ValueError as error:
        raise ValueError(f"compression {text!r} has no meaning: {error}") from None
    raise ValueError(f"compression must be one of {', '.join(_EXAMPLES)}; got {text!r}")

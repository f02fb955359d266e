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
    "topk": lambda number: TopK(float(number)),
    "randomk": lambda number: RandomK(float(number)),
    "powersgd": lambda number: LowRank(int(number)),
}
_EXAMPLES = (*_PLAIN, "topk:0.01", "randomk:0.01", "powersgd:2")


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

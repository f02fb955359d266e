"""How much memory the value of a JSON text would take, known before it is made.

[Note: a budget of values]
A value takes far more memory than its shortest text: forty times as much for ``{"a":1}``, and
reading it takes as much longer. So the text is priced first, by counting: nothing is made for that.
Two bytes for each byte of the text (the text itself, and what strings contain), are always granted.
Objects beyond that must fit into a room that is the same for all files, and some more for each
record of a tensor, which is what honest files consist of. Writers refuse by the same rule.
"""

from __future__ import annotations

import re

ROOM_BYTES = 64 << 20
"""What the values of any file may take, beyond twice the file: about a million numbers."""

_RECORD_TEXT_BYTES = 256
_TEXT_GROWTH = 16
# A record of a tensor may take 4 KiB, which is what one takes with its share of an optimizer's
# values. But no text grows by more than this factor, whatever its records claim.

# What CPython takes at most for each, with temporaries: measured by the tests.
_PRICES = {b",": 42, b"[": 88, b"{": 72, b":": 120, b'"': 28}
# A string is as wide as its widest character: one beyond ASCII can make four bytes of all others.
_WIDE = 3
_ESCAPE = b"\\u"
# Possessive, and an open end matches as well: each byte is looked at once, whatever the text.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)


def budget(num_bytes: int, num_records: int) -> int:
    """What objects of a text of that size may take, beyond twice the text."""
    return ROOM_BYTES + _TEXT_GROWTH * min(num_bytes, _RECORD_TEXT_BYTES * num_records)


def check_memory(data: bytes, record: bytes = b"") -> int:
    """Refuses a JSON text whose value would take more memory than honest ones do.

    Args:
        data: The text.
        record: What is once in the text for each tensor, or each slice of one.

    Returns:
        How many strings were looked at one by one: none, unless texts look like structure.

    Raises:
        ValueError: If it is above the budget.
    """
    num_records = data.count(record) if record else 0
    most = budget(len(data), num_records)
    # Text that is not ASCII is wide twice: as the text, and as the strings made from it.
    width = 0 if data.isascii() else 2 * _WIDE * len(data)
    escapes = _WIDE * len(data) if _ESCAPE in data else 0
    if width + escapes + _price(data, 0, len(data)) <= most:
        return 0
    return _check_exactly(data, width, most, num_records)


def _check_exactly(data: bytes, price: int, most: int, num_records: int) -> int:
    """What is inside of strings is no structure; ends as soon as the budget is spent."""
    offset = num_strings = 0
    for string in _STRING.finditer(data):
        num_strings += 1
        begin, end = string.span()
        price += _price(data, offset, begin) + 2 * _PRICES[b'"']
        if data.find(_ESCAPE, begin, end) >= 0:
            price += _WIDE * (end - begin)
        offset = end
        if price > most:
            break
    if price + _price(data, offset, len(data)) > most:
        raise ValueError(
            f"its {len(data)} bytes hold more lists, objects, texts and numbers than "
            f"{most >> 20} MiB of memory have room for, which is the most for {num_records} "
            "records of tensors: many numbers belong into a tensor"
        )
    return num_strings


def _price(data: bytes, begin: int, end: int) -> int:
    """An upper bound, since strings may contain what looks like structure."""
    return sum(data.count(each, begin, end) * price for each, price in _PRICES.items())

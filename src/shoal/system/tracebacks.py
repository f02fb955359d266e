"""Tracebacks as text: shoal's own frames are hidden, and those that say the same are found."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path

from shoal.system.site import TORCH

VARIABLE = "SHOAL_TRACEBACK"
"""`full` shows every frame."""

_PACKAGE = os.path.join(os.path.realpath(Path(__file__).parents[1]), "")
_TORCH = os.path.join(os.path.realpath(TORCH), "")
_CONTEXTLIB = os.path.realpath(contextlib.__file__)
_FRAME = re.compile(r'^(?P<margin>[ |]*)  File "(?P<file>[^"]+)", line \d+')
# What differs between ranks though they say the same: times, addresses, pids.
_VARYING = re.compile(r"(, for )?\b\d+(\.\d+)? s\b|\b0x[0-9a-f]+\b|\bpid \d+\b")


def hide_own_frames(text: str) -> str:
    """The traceback, with a line in place of each row of shoal's frames.

    Frames of torch and of contextlib go with them where they only lead from the user's code to
    shoal's and back. Where nothing would be left, nothing is hidden.

    Example:
        >>> print(hide_own_frames(traceback.format_exc()))
        Traceback (most recent call last):
          File "train.py", line 8, in <module>
            world.all_reduce(torch.ones(1000))
          (7 frames in shoal; SHOAL_TRACEBACK=full shows them)
        shoal.errors.PeerError: rank 2 failed: ValueError: the loss is nan (train.py:7)
    """
    if os.environ.get(VARIABLE) == "full":
        return text
    blocks = [_Block(*each) for each in _blocks(text.splitlines())]
    rows = [list(row) for _, row in groupby(blocks, lambda block: block.leads)]
    if all(block.leads for block in blocks if block.frame is not None):
        return text
    lines: list[str] = []
    for row, following in zip_longest(rows, rows[1:]):
        is_last = following is None or following[0].frame is None
        lines += _shown(row, is_last=is_last)
    return "\n".join(lines)


def says(text: str) -> str:
    """What a traceback says: equal for ranks that differ in times, addresses and pids only."""
    return _VARYING.sub("", text).strip()


def message_of(text: str) -> str:
    """The exception itself, without the frames before it: the last of several that are chained."""
    lines = text.strip().splitlines()
    last = max((number for number, line in enumerate(lines) if _FRAME.match(line)), default=-1)
    rest = lines[last + 1 :]
    start = next((number for number, line in enumerate(rest) if not line.startswith(" ")), 0)
    return "\n".join(rest[start:])


def _blocks(lines: list[str]) -> Iterator[tuple[list[str], re.Match[str] | None]]:
    """Frames with their lines of source, and all other lines alone."""
    number = 0
    while number < len(lines):
        frame = _FRAME.match(lines[number])
        end = number + 1
        if frame is not None:
            source = frame["margin"] + "    "
            while end < len(lines) and lines[end].startswith(source):
                end += 1
        yield lines[number:end], frame
        number = end


class _Block:
    """A frame with its lines of source, or another line."""

    def __init__(self, lines: list[str], frame: re.Match[str] | None) -> None:
        """``leads``: it is shoal's, or may only lead there from the user's code, or back."""
        self.lines, self.frame = lines, frame
        file = "" if frame is None else os.path.realpath(frame["file"])
        self.is_own, self.is_torchs = file.startswith(_PACKAGE), file.startswith(_TORCH)
        self.leads = self.is_own or self.is_torchs or file == _CONTEXTLIB


def _shown(row: list[_Block], *, is_last: bool) -> list[str]:
    """The lines of a row, or one in their place; what follows shoal's last frame is a cause."""
    own = [number for number, block in enumerate(row) if block.is_own]
    end = 0 if not own else own[-1] + 1 if is_last else len(row)
    hidden = row[:end]
    rest = [line for block in row[end:] for line in block.lines]
    return [_stand_in(hidden), *rest] if hidden else rest


def _stand_in(hidden: list[_Block]) -> str:
    frames = "1 frame" if len(hidden) == 1 else f"{len(hidden)} frames"
    whose = "shoal and torch" if any(block.is_torchs for block in hidden) else "shoal"
    margin = hidden[0].frame["margin"] if hidden[0].frame else ""
    return f"{margin}  ({frames} in {whose}; {VARIABLE}=full shows them)"

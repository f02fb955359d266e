"""What a rank leaves behind when it exits, for ranks that exit after it to compare with their own.

Where nothing is communicated at the end of a run, a difference between the ranks would go unseen,
and a rank that leaves must not wait for the others. So each rank writes a few bytes to the control
plane as its last note, and the last rank to leave has the records of all others.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shoal.comm.control.plane import HIDDEN

_MARK = f"the end of its work{HIDDEN}"
_LONGEST = 900
"""As much as a note on the control page has room for."""


class Recorded(Protocol):
    """An object that the ranks compare when they exit."""

    def exit_record(self) -> str:
        """This rank's, a few bytes."""
        ...

    def check_exit_records(self, records: Mapping[int, str]) -> None:
        """Raises `MismatchError` unless the records of other ranks, by rank, fit this one's."""
        ...


class ExitRecords:
    """The records that one rank of a world leaves behind, and those it finds."""

    def __init__(self) -> None:
        self._own: dict[str, weakref.ref[Recorded]] = {}
        self._found: dict[int, dict[str, str]] = {}

    def add(self, ranks: Sequence[int], recorded: Recorded) -> None:
        """``ranks`` are those that have one like it; they add theirs in the same order."""
        members = ",".join(map(str, ranks))
        number = sum(key.startswith(f"{members}#") for key in self._own)
        self._own[f"{members}#{number}"] = weakref.ref(recorded)

    def note(self) -> str:
        """The text to leave as this rank's last note; empty if there is nothing to compare."""
        records = {key: each.exit_record() for key, each in self._living().items()}
        text = json.dumps(records)
        return f"{_MARK}{text}" if records and len(text) < _LONGEST else ""

    def find(self, whereabouts: Callable[[int], str], others: Sequence[int]) -> list[int]:
        """Reads the last notes of other ranks; returns the ranks that have left none yet."""
        for rank in others:
            text = whereabouts(rank)
            if text.startswith(_MARK):
                with contextlib.suppress(ValueError):  # it is writing: there is another look
                    self._found[rank] = json.loads(text.removeprefix(_MARK))
        return [rank for rank in others if rank not in self._found]

    def check(self) -> None:
        """Raises `MismatchError` if the records that were found do not fit; once."""
        found, self._found = self._found, {}
        for key, each in self._living().items():
            each.check_exit_records({rank: own[key] for rank, own in found.items() if key in own})

    def _living(self) -> dict[str, Recorded]:
        pairs = [(key, reference()) for key, reference in self._own.items()]
        return {key: each for key, each in pairs if each is not None}

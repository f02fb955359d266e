"""What a rank says when it leaves, for those that leave after it.

Where nothing is communicated at the end of a run, a difference between the ranks would go unseen.
Leaving must not wait for anybody. So each rank leaves a few bytes behind, where its last
whereabouts are told, and the last to leave has those of all others to compare with its own.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shoal.comm.control.plane import HIDDEN

_MARK = f"the end of its work{HIDDEN}"
_LONGEST = 900
"""As much as a note on the control page has room for."""


class Farewell(Protocol):
    """Something that the ranks compare when they leave."""

    def last_word(self) -> str:
        """This rank's, a few bytes."""
        ...

    def check_last_words(self, words: Mapping[int, str]) -> None:
        """Raises if those of other ranks, by rank, do not fit."""
        ...


class Farewells:
    """What one rank of a world leaves behind, and finds."""

    def __init__(self) -> None:
        """Nothing to say."""
        self._own: dict[str, weakref.ref[Farewell]] = {}
        self._found: dict[int, dict[str, str]] = {}

    def add(self, ranks: Sequence[int], farewell: Farewell) -> None:
        """``ranks`` are those that have one like it; they add theirs in the same order."""
        members = ",".join(map(str, ranks))
        number = sum(key.startswith(f"{members}#") for key in self._own)
        self._own[f"{members}#{number}"] = weakref.ref(farewell)

    def note(self) -> str:
        """What to leave behind as this rank's last whereabouts; empty for nothing."""
        words = {key: one.last_word() for key, one in self._living().items()}
        text = json.dumps(words)
        return f"{_MARK}{text}" if words and len(text) < _LONGEST else ""

    def find(self, whereabouts: Callable[[int], str], others: Sequence[int]) -> list[int]:
        """Looks for what others left behind; returns those that have left nothing yet."""
        for rank in others:
            text = whereabouts(rank)
            if text.startswith(_MARK):
                self._found[rank] = json.loads(text.removeprefix(_MARK))
        return [rank for rank in others if rank not in self._found]

    def check(self) -> None:
        """Raises `MismatchError` if what was found does not fit; once."""
        found, self._found = self._found, {}
        for key, one in self._living().items():
            one.check_last_words({rank: said[key] for rank, said in found.items() if key in said})

    def _living(self) -> dict[str, Farewell]:
        pairs = [(key, reference()) for key, reference in self._own.items()]
        return {key: one for key, one in pairs if one is not None}

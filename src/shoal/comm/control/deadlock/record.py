"""What a blocked rank shows the others: its waits, and how far it has got in each group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_RECORD_BYTES = 32 << 10
"""A longer record is not shown: that rank is never found to be in a deadlock."""

OPERATION, SETTLED, SEND, RECV = "operation", "settled", "send", "recv"
_ANSWERS = {SEND: RECV, RECV: SEND}


class Awaited(NamedTuple):
    """What a wait needs of the ranks that are missing.

    Attributes:
        kind: `OPERATION`: that they begin the group's operation of this number. `SETTLED`: that
            they are through with so many transfers. `SEND` and `RECV` (what the waiting rank
            does): that they begin the other half of the message.
        group_id: The group.
        number: Of the operation, the transfers, or the message among those of its tag.
        tag: Of a message.
    """

    kind: str
    group_id: int
    number: int
    tag: int = 0


class LongWait(NamedTuple):
    """A wait of one thread that has become long.

    Attributes:
        serial: Tells it from all other waits of the process.
        awaited: What it needs.
        missing: The world ranks of which it needs that.
        group: What users know the group as.
    """

    serial: int
    awaited: Awaited
    missing: tuple[int, ...]
    group: str


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has got.

    Attributes:
        groups: By group: how many operations were begun, how many transfers are settled.
        messages: How many were begun, by group, kind, the other's world rank and tag. None if
            there are too many to tell.
    """

    groups: Mapping[int, tuple[int, int]]
    messages: Mapping[tuple[int, str, int, int], int] | None

    def has_begun(self, awaited: Awaited, waiting: int) -> bool:
        """Whether it did, or may have done, what rank ``waiting`` needs of it."""
        num_begun, num_settled = self.groups.get(awaited.group_id, (0, 0))
        if awaited.kind == OPERATION:
            return num_begun >= awaited.number
        if awaited.kind == SETTLED:
            return num_settled >= awaited.number
        if self.messages is None:
            return True
        key = (awaited.group_id, _ANSWERS[awaited.kind], waiting, awaited.tag)
        return self.messages.get(key, 0) >= awaited.number


@dataclass(frozen=True)
class WaitRecord:
    """A rank all of whose threads wait.

    Attributes:
        waits: Those for other ranks.
        progress: How far the rank has got.
        call: The public call that it is in, with the user's line.
        spent_ns: Processor time of threads that only seem to wait; it must not change.
    """

    waits: Sequence[LongWait]
    progress: RankProgress
    call: str
    spent_ns: int = 0

    def encode(self) -> bytes:
        """As bytes; none at all if they are too many. Equal records have equal bytes."""
        for messages in (self.progress.messages, None):
            data = json.dumps(self._fields(messages), separators=(",", ":")).encode()
            if len(data) <= MOST_RECORD_BYTES:
                return data
        return b""

    def _fields(self, messages: Mapping[tuple[int, str, int, int], int] | None) -> list[Any]:
        counts = None if messages is None else [[*key, n] for key, n in sorted(messages.items())]
        groups = [[group, *numbers] for group, numbers in sorted(self.progress.groups.items())]
        return [self.waits, groups, counts, self.call, self.spent_ns]

    @classmethod
    def decode(cls, data: bytes) -> WaitRecord | None:
        """The inverse of `encode`; None for what is no record."""
        try:
            waits, groups, counts, call, spent_ns = json.loads(data)
            progress = RankProgress(
                {group: (begun, settled) for group, begun, settled in groups},
                None if counts is None else {tuple(key): n for *key, n in counts},
            )
            found = [
                LongWait(serial, Awaited(*awaited), tuple(missing), group)
                for serial, awaited, missing, group in waits
            ]
            return cls(found, progress, str(call), spent_ns)
        except (ValueError, TypeError):
            return None

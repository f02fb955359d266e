"""Who cannot go on, from what all ranks show; pure.

[Note: proof of a deadlock]
A record says of one moment: all threads of this rank wait, for these things, and the rank has begun
so much in each group. A set of ranks is stuck if each wait of each member needs a member that has
not begun what is needed. Records are of different moments and may be old, yet that is a proof:
suppose some member went on after its record, and take the first to do so. One of its waits
ended, so the member that this wait needed had begun it. Its record says that it had not, so it
went on after its own record, and before the first. So nobody went on, and nobody will.
It is the largest such set that is found: ranks that wait for a cycle are stuck as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.comm.control.deadlock.record import RECV, SEND, LongWait, WaitRecord
from shoal.system.rank_names import name_ranks, name_spans

_MOST_LINES = 16
_REASON = re.compile(r"DeadlockError of ranks? ([-0-9, ]+): ")


class Deadlock(NamedTuple):
    """The ranks that are stuck with each other, and what to say of them."""

    ranks: Sequence[int]
    text: str


def encode_reason(verdict: Deadlock) -> str:
    """For a `Failure`, which also goes to ranks that are not part of the deadlock."""
    return f"DeadlockError of {name_spans(verdict.ranks)}: {verdict.text}"


def decode_reason(reason: str) -> Deadlock | None:
    """The inverse of `encode_reason`; None for any other failure."""
    match = _REASON.match(reason)
    if match is None:
        return None
    ranks: list[int] = []
    for span in match[1].split(", "):
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return Deadlock(ranks, reason[match.end() :])


def stuck_with(rank: int, records: Mapping[int, WaitRecord]) -> list[int]:
    """The ranks that a rank is stuck with, itself among them; none if it may go on."""
    stuck = {each for each, record in records.items() if record.waits}
    while free := {each for each in stuck if _may_go_on(each, stuck, records)}:
        stuck -= free
    found: set[int] = set()
    new = {rank} & stuck
    while new:
        found |= new
        new = {need for each in new for need in _needs(each, stuck, records)} - found
    return sorted(found)


def _may_go_on(rank: int, stuck: Iterable[int], records: Mapping[int, WaitRecord]) -> bool:
    return not all(_blockers(rank, wait, stuck, records) for wait in records[rank].waits)


def _needs(rank: int, stuck: Iterable[int], records: Mapping[int, WaitRecord]) -> set[int]:
    waits = records[rank].waits
    return {need for wait in waits for need in _blockers(rank, wait, stuck, records)}


def _blockers(
    rank: int, wait: LongWait, stuck: Iterable[int], records: Mapping[int, WaitRecord]
) -> set[int]:
    """The ranks that are stuck and have not begun what a wait needs."""
    candidates = set(wait.missing).intersection(stuck)
    return {each for each in candidates if not records[each].progress.has_begun(wait.awaited, rank)}


def report(records: Mapping[int, WaitRecord]) -> str:
    """Who waits for whom, in the user's words; ranks that do the same share a line."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(records.items()):
        waits = ", and ".join(dict.fromkeys(_waits_text(wait) for wait in record.waits))
        alike.setdefault((record.call, waits), []).append(rank)
    lines = ["ranks wait for each other, and none of them can go on:"]
    for (call, waits), ranks in list(alike.items())[:_MOST_LINES]:
        verb = "waits" if len(ranks) == 1 else "wait"
        lines.append(f"  {name_ranks(ranks)} in {call}: {verb} {waits}")
    if len(alike) > _MOST_LINES:
        lines.append(f"  ... and {len(alike) - _MOST_LINES} more calls")
    lines.append("Let every rank of a group make the same calls in the same order.")
    return "\n".join(lines)


def _waits_text(wait: LongWait) -> str:
    message = f", message of tag {wait.awaited.tag}" if wait.awaited.kind in (SEND, RECV) else ""
    return f"for {name_ranks(wait.missing)} in {wait.group}{message}"

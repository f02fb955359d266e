"""Who writes what, as all ranks know it; remembered while nobody holds anything else.

[Note: the same as last time]
From one save to the next ranks seldom hold anything else. So each shows the others a digest of what
it holds, and one of what all of them held last time. Only if every rank remembers what all of them
hold now is the last division taken again; if not, they show each other everything. All ranks see
the same digests, so all decide alike, also if some of them remember another save or none.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.checkpoint.format import strict_json
from shoal.checkpoint.save import merging
from shoal.checkpoint.save.assignment import Claims, Work, assign
from shoal.checkpoint.together import together
from shoal.comm import Backend


@dataclass(frozen=True)
class Division:
    """Who holds what and who writes what.

    Attributes:
        claims: What each rank holds.
        work: What each rank writes.
        digest: Of the claims.
    """

    claims: Sequence[Claims]
    work: Sequence[Work]
    digest: str


_last: weakref.WeakKeyDictionary[object, Division] = weakref.WeakKeyDictionary()


def caller(ranks: Backend | None) -> object:
    """Who saves one at a time: a rank, or a thread that has no world."""
    return threading.current_thread() if ranks is None else ranks


def digests(ranks: Backend | None, claims: Claims) -> tuple[str, str]:
    """Of what this rank holds, and of what all ranks held last time."""
    last = _last.get(caller(ranks))
    return _digest(strict_json.encode(merging.claims_json(claims))), last.digest if last else ""


def divide(
    ranks: Backend | None, claims: Claims, shown: Sequence[tuple[str, str]], doing: str
) -> Division:
    """Divides what all ranks hold among them; see [Note: the same as last time].

    Args:
        ranks: Who takes part; None for a process of its own.
        claims: What this rank holds.
        shown: The `digests` of each rank.
        doing: For messages.
    """
    digest = _digest("".join(own for own, _ in shown).encode())
    if all(known == digest for _, known in shown):
        return _last[caller(ranks)]
    content = together(ranks, lambda: merging.claims_json(claims), doing)
    everybodys = [merging.parse_claims(each) for each in content]
    division = Division(everybodys, assign(everybodys), digest)
    _last[caller(ranks)] = division
    return division


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

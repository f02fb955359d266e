"""Which rank writes what, as all ranks know it; remembered from one save to the next.

[Note: the same as last time]
From one save to the next ranks seldom hold anything else. So each shows the others a digest of what
it holds, and one of what all ranks held last time. Only if every rank remembers what all ranks hold
now is the last division taken again; if not, they show each other everything. All ranks see the
same digests, so all decide alike, also if some of them remember another save or none.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.checkpoint.save.assignment import Assigned, Claim, Claims, assign
from shoal.checkpoint.together import caller, together
from shoal.comm import Backend


@dataclass(frozen=True)
class Division:
    """Which rank writes what.

    Attributes:
        keys: All tensors that any rank holds.
        assigned: What each rank writes.
        digest: Of what each rank holds.
    """

    keys: Sequence[str]
    assigned: Sequence[Assigned]
    digest: str


_last: weakref.WeakKeyDictionary[object, Division] = weakref.WeakKeyDictionary()


def digests(ranks: Backend | None, claims: Claims) -> tuple[str, str]:
    """Of what this rank holds, and of what all ranks held last time."""
    last = _last.get(caller(ranks))
    return _digest(repr(claims)), last.digest if last else ""


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
    digest = _digest("".join(own for own, _ in shown))
    if all(known == digest for _, known in shown):
        return _last[caller(ranks)]
    own = {key: claim.to_json() for key, claim in claims.items()}
    by_rank = [
        {key: Claim.from_json(content) for key, content in contents.items()}
        for contents in together(ranks, lambda: own, doing)
    ]
    keys = list(dict.fromkeys(key for claims in by_rank for key in claims))
    division = _last[caller(ranks)] = Division(keys, assign(by_rank), digest)
    return division


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

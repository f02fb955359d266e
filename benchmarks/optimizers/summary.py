"""What the records of the sweep come to: a line for each optimizer, and the table of the docs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examination import Outcome

_ORDER = list(Outcome)
_LONGEST_REASON = 200
_MARKER = "<!-- what `make sweep` found -->"
_NOT_COMPARED = (Outcome.UNTRIED, Outcome.UNUSABLE, Outcome.SLOW)
_WRONG = (Outcome.DIFFERENT, Outcome.FAILED)


@dataclass(frozen=True)
class Summary:
    """One optimizer over all its comparisons."""

    name: str
    outcome: Outcome
    kinds: tuple[str, ...]
    num_equal: int
    num_compared: int
    detail: str
    reason: str

    @classmethod
    def of(cls, name: str, records: Sequence[dict[str, Any]]) -> Summary:
        """The worst outcome counts; what could not be compared only where nothing could."""
        compared = [each for each in records if Outcome(each["outcome"]) not in _NOT_COMPARED]
        worst = max(compared or records, key=lambda each: _ORDER.index(Outcome(each["outcome"])))
        where = ", ".join(str(worst[key]) for key in ("division", "training") if key in worst)
        return cls(
            name=name,
            outcome=Outcome(worst["outcome"]),
            kinds=tuple(dict.fromkeys(each["kind"] for each in records if "kind" in each)),
            num_equal=sum(each["outcome"] == Outcome.EQUAL for each in records),
            num_compared=len(compared),
            detail=f"{worst['detail']} ({where})" if worst["detail"] else "",
            reason=next((each["reason"] for each in records if each.get("reason")), ""),
        )

    @classmethod
    def without_comparison(cls, name: str, outcome: Outcome, why: str = "") -> Summary:
        """One of which there are no records."""
        return cls(name, outcome, (), 0, 0, why, "")

    @property
    def is_wrong(self) -> bool:
        """Whether it is neither right nor refused."""
        return self.outcome in _WRONG

    def __str__(self) -> str:
        parts = [self.name, self.outcome.value, f"{self.num_equal} of {self.num_compared} equal"]
        return "  ".join([*parts, "/".join(self.kinds), self.detail]).rstrip()


def counted(summaries: Sequence[Summary]) -> str:
    """How many of each outcome."""
    counts = Counter(each.outcome for each in summaries)
    parts = ", ".join(f"{counts[each]} {each.value}" for each in Outcome if counts[each])
    return f"{len(summaries)} optimizers: {parts}"


def markdown(now: Sequence[Summary], before: Sequence[Summary] | None = None) -> str:
    """A table of kinds and outcomes, if wanted beside those of another version."""
    columns = ["optimizer", "kind", "outcome", "why"]
    if before is not None:
        columns[1:1] = ["kind before", "outcome before"]
    rows = [columns, ["---"] * len(columns)]
    for number, each in enumerate(now):
        cells = [each.name, *_verdict(each), _why(each)]
        if before is not None:
            cells[1:1] = _verdict(before[number])
        rows.append([cell.replace("|", "\\|") for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _why(summary: Summary) -> str:
    """Of the kind, unless the outcome has to be explained."""
    is_explained = summary.outcome is Outcome.EQUAL and summary.reason
    return textwrap.shorten(summary.reason if is_explained else summary.detail, _LONGEST_REASON)


def _verdict(summary: Summary) -> list[str]:
    outcome = summary.outcome.value
    if summary.outcome is Outcome.DIFFERENT:
        outcome = f"**{outcome}**"
    return [" or ".join(summary.kinds), outcome]


def put_into(page: Path, table: str) -> None:
    """Replaces what follows the page's marker."""
    head, marker, _ = page.read_text().partition(_MARKER)
    if not marker:
        raise ValueError(f"{page} must have a line {_MARKER} for the table to follow; it has none")
    page.write_text(f"{head}{_MARKER}\n\n{table}")

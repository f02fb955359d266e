"""Whether targets were met: one line for each, and what was missed below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console


class Verdict(NamedTuple):
    """One target in one of the cases that it speaks of."""

    passed: bool
    text: str


def print_judged(
    console: Console, title: str, judged: Iterable[tuple[str, Sequence[Verdict]]]
) -> bool:
    """Tells of each target in how many cases it was met; True if none was missed.

    Args:
        console: Where to.
        title: Above the lines.
        judged: Targets with their verdicts; none where nothing it speaks of was measured.
    """
    console.print(f"[bold]{title}[/bold]")
    all_passed = True
    for name, verdicts in judged:
        missed = [verdict.text for verdict in verdicts if not verdict.passed]
        all_passed &= not missed
        word = "SKIP" if not verdicts else "MISSED" if missed else "PASS"
        colour = {"SKIP": "dim", "MISSED": "red", "PASS": "green"}[word]
        reached = f"{len(verdicts) - len(missed)} of {len(verdicts)}"
        console.print(f"[{colour}]{word:6}[/{colour}]  {name}: {reached}", highlight=False)
        for text in missed:
            console.print(f"          {text}", highlight=False)
    return all_passed

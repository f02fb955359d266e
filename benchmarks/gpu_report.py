"""What the contest on GPUs found, contender by contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_turn import Outcome
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from timing import Times, readable_time

BASES = ("torch-ddp", "alone")


@dataclass
class Entry:
    """One contender with one model, over all rounds.

    Attributes:
        step_s: What each step took on its slowest rank.
        host_s: How long the slowest host was busy with each, until its last call returned.
        peak_bytes: The most that a rank had allocated in a timed step; None on a CPU.
        loss: Of the last step, the mean of all ranks.
        errors: What went wrong.
    """

    model: str
    contender: str
    ranks: int
    step_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    loss: float | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether it had a turn."""
        return bool(self.step_s or self.errors)

    @property
    def step(self) -> Times:
        """Over all steps so far."""
        return _times(self.step_s)

    @property
    def host(self) -> Times:
        """Over all steps so far."""
        return _times(self.host_s)

    def add(self, outcome: Outcome) -> None:
        """Takes in one more turn."""
        self.errors += outcome.errors
        if not (results := outcome.results):
            return
        self.step_s += _slowest(results, "step_s")
        self.host_s += _slowest(results, "host_s")
        self.loss = sum(result["loss"] for result in results) / len(results)
        peaks = [result["peak_bytes"] for result in results]
        if None not in peaks:
            self.peak_bytes = max(*peaks, self.peak_bytes or 0)

    def news(self, outcome: Outcome) -> str:
        """One line about its last turn."""
        found = readable_time(self.step.median) if outcome.results else "nothing measured"
        return f"{found}, FAILED" if outcome.errors else f"{found} so far"

    def row(self) -> dict[str, Any]:
        """For JSON, with every step."""
        row: dict[str, Any] = {"model": self.model, "contender": self.contender}
        row |= {"ranks": self.ranks, "peak_bytes": self.peak_bytes, "loss": self.loss}
        if self.step_s:
            row |= {"step": self.step.as_dict(), "host": self.host.as_dict()}
        return row | {"step_s": self.step_s, "host_s": self.host_s, "errors": self.errors}


def _times(samples: list[float]) -> Times:
    return Times.of(torch.tensor(samples, dtype=torch.float64))


def _slowest(results: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [max(ranks) for ranks in zip(*(result[key] for result in results), strict=True)]


def print_table(console: Console, entries: Sequence[Entry]) -> None:
    """The contenders of one model that were measured."""
    measured = [entry for entry in entries if entry.step_s]
    if not measured:
        return
    base = _base(measured)
    name = base.contender if base else "base"
    first = measured[0]
    table = Table(title=f"{first.model}, {first.ranks} ranks", title_justify="left")
    table.add_column("contender")
    columns = (
        escape("step [quartiles]"),
        f"x {name}",
        "host",
        "host / step",
        "peak GiB",
        f"x {name}",
    )
    for column in (*columns, "loss", "steps"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in measured:
        table.add_row(*_cells(entry, base))
    console.print(table)


def _base(measured: Sequence[Entry]) -> Entry | None:
    """What others are compared with: of one rank alone the plain model."""
    names = BASES if measured[0].ranks > 1 else BASES[::-1]
    by_name = {entry.contender: entry for entry in measured}
    return next((by_name[name] for name in names if name in by_name), None)


def _cells(entry: Entry, base: Entry | None) -> list[str]:
    step, host, peak = entry.step, entry.host, entry.peak_bytes
    quartiles = escape(f"[{readable_time(step.low)}, {readable_time(step.high)}]")
    return [
        entry.contender,
        f"{readable_time(step.median)} {quartiles}",
        f"{step.median / base.step.median:.2f}" if base else "",
        readable_time(host.median),
        f"{host.median / step.median:.2f}",
        f"{peak / 2**30:.2f}" if peak is not None else "",
        f"{peak / base.peak_bytes:.2f}" if peak and base and base.peak_bytes else "",
        f"{entry.loss:.4f}",
        str(step.count),
    ]


def print_errors(console: Console, entries: Sequence[Entry]) -> None:
    """What went wrong, at length."""
    for entry in entries:
        for error in entry.errors:
            console.print(f"{entry.model}, {entry.contender} FAILED:", style="red")
            console.print(error, markup=False, soft_wrap=True)

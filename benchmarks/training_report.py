"""What `training.py` found: a table for each shape, and the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from roster import ALONE, INDEPENDENT, counterpart
from training_targets import judge
from verdicts import print_judged

Row = dict[str, Any]


def print_legend(console: Console) -> None:
    """What the columns mean."""
    console.print(
        "ms for a step: median and quartiles over rounds, of the slowest of 2 processes. Ratios "
        "are of medians, and below 1 is faster. `alone` is one process with the other idle. "
        "Off by: the largest difference of a parameter from the first contender's.",
        highlight=False,
    )


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """The contenders at one shape."""
    first = rows[0]
    title = f"GPT of {first['title']}: {first['parameters'] / 1e6:.1f} M parameters"
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for name in ("median", "quartiles", f"/ {ALONE}", f"/ {INDEPENDENT}", "/ torch's own"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("torch's own", style="dim")
    table.add_column("off by", justify="right", style="dim")
    medians = {row["contender"]: row["median_s"] for row in rows}
    family = ""
    for row in rows:
        before, family = family, row["contender"].partition("-")[0]
        if before and before != family:
            table.add_section()
        table.add_row(*_cells(row, medians))
    console.print(table)


def _cells(row: Row, medians: Mapping[str, float]) -> list[str]:
    name, median = row["contender"], row["median_s"]
    torch_own = counterpart(name) or ""
    others = (medians.get(other) for other in (ALONE, INDEPENDENT, torch_own))
    return [
        name,
        _in_ms(median),
        f"{_in_ms(row['low_s'])} to {_in_ms(row['high_s'])}",
        *("" if other is None else f"{median / other:.2f}" for other in others),
        torch_own if torch_own in medians else "",
        "" if row["difference"] is None else f"{row['difference']:.0e}",
    ]


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def print_verdicts(console: Console, rows: Sequence[Row]) -> bool:
    """One line for each target, and the shapes at which it was missed; True if none was."""
    return print_judged(console, "Targets with 2 processes", judge(rows))

"""What `collectives.py` found: as tables, as a plot, as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from targets import OWN, PLAIN, judge
from timing import readable_size, readable_time
from verdicts import print_judged

Row = dict[str, Any]
_BASE = "torch gloo"


def environment() -> dict[str, Any]:
    """Where and when this was measured."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def save_json(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": about, "results": list(rows)}, indent=1) + "\n")


def print_tables(console: Console, rows: Sequence[Row]) -> None:
    """A table for each number of ranks and each operation."""
    keys = dict.fromkeys((row["ranks"], row["operation"]) for row in rows)
    for ranks, operation in keys:
        mine = [row for row in rows if (row["ranks"], row["operation"]) == (ranks, operation)]
        console.print(_table(f"{operation}, {ranks} processes", mine))
    console.print(
        "median (quartiles); x floor and x torch gloo are for shm on its own memory. The floor is "
        "at the rate of the fastest copy, the torch floor (to compare) at that of torch's copy_."
    )


def _table(title: str, rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    table = Table(title=title, title_justify="left")
    table.add_column("size", justify="right")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("floor", "x floor", "torch floor", "x torch gloo"):
        table.add_column(name, justify="right", style="cyan")
    for num_bytes in dict.fromkeys(row["bytes"] for row in rows):
        by_name = {row["contender"]: row for row in rows if row["bytes"] == num_bytes}
        own = by_name.get(OWN, by_name[PLAIN])
        table.add_row(
            readable_size(num_bytes),
            *(_cell(by_name[name]) for name in names),
            readable_time(own["floor_s"]),
            f"{own['median_s'] / own['floor_s']:.2f}",
            readable_time(own["torch_floor_s"]),
            f"{by_name[_BASE]['median_s'] / own['median_s']:.1f}",
        )
    return table


def _cell(row: Row) -> str:
    low, high = readable_time(row["low_s"]), readable_time(row["high_s"])
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{readable_time(row['median_s'])}\n[dim]({low} to {high})[/dim]"


def print_verdicts(console: Console, rows: Sequence[Row]) -> bool:
    """One line for each target, and the sizes at which it was missed; True if none was."""
    return print_judged(console, "Targets with 2 processes", judge(rows))


def save_plot(path: Path, rows: Sequence[Row]) -> None:
    """Time over size, a panel for each operation and number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    all_ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    figure, axes = plt.subplots(
        len(all_ranks),
        len(operations),
        figsize=(4 * len(operations), 3.6 * len(all_ranks) + 0.6),
        squeeze=False,
        sharex=True,
    )
    for line, ranks in zip(axes, all_ranks, strict=True):
        for panel, operation in zip(line, operations, strict=True):
            mine = [r for r in rows if (r["ranks"], r["operation"]) == (ranks, operation)]
            _draw(panel, mine)
            panel.set_title(f"{operation}, {ranks} processes", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw(panel: Any, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        sizes = [row["bytes"] for row in mine]
        style = {"marker": "o", "markersize": 3, "linewidth": 2 if name == OWN else 1.2}
        (line,) = panel.plot(sizes, [row["median_s"] * 1e3 for row in mine], label=name, **style)
        low, high = ([row[key] * 1e3 for row in mine] for key in ("low_s", "high_s"))
        panel.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    first = [row for row in rows if row["contender"] == rows[0]["contender"]]
    sizes, floors = [row["bytes"] for row in first], [row["floor_s"] * 1e3 for row in first]
    panel.plot(sizes, floors, "k--", linewidth=1, label="floor")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [readable_size(size) for size in sizes], rotation=60, fontsize=7)
    panel.set_ylabel("ms", fontsize=8)
    panel.grid(alpha=0.3)

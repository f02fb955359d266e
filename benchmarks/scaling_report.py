"""What `scaling.py` found: tables, and whether the targets were met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from grouping import GROUPED, SILENT, UNGROUPED
from rich.table import Table
from timing import readable_time
from verdicts import Verdict

Row = dict[str, Any]

KINDS = ("parameters", "gradients", "state")
SHARDED = {"ddp": (), "zero1": ("state",), "zero2": ("gradients", "state")}
"""What each strategy divides among the ranks; the others divide everything."""
PADDING = 1.05
"""Slices are padded, and some state is one number for many parameters."""
TIMES_LESS_EXPOSED = 10


def share(strategy: str, kind: str, ranks: int) -> float:
    """What theory says that a rank has of the whole."""
    return 1 / ranks if kind in SHARDED.get(strategy, KINDS) else 1.0


def whole_bytes(row: Row, kind: str) -> int:
    """Of one process that holds everything: AdamW has two numbers for each parameter."""
    return int(row["parameters"]) * 4 * (2 if kind == "state" else 1)


def scaling_table(title: str, rows: Sequence[Row]) -> Table:
    """One line for each strategy and number of ranks."""
    table = Table(title=title, title_justify="left")
    for name in ("strategy", "ranks", *KINDS, "held", "of plain", "step", "/ 1 rank"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        for row in mine:
            table.add_row(*_cells(row, mine[0]), end_section=row is mine[-1])
    return table


def _cells(row: Row, first: Row) -> list[str]:
    held, times = row["held_bytes"], row["times_s"]
    total, plain = sum(held.values()), sum(whole_bytes(row, kind) for kind in KINDS)
    spread = f"({readable_time(times['low'])} to {readable_time(times['high'])})"
    return [
        row["strategy"],
        str(row["ranks"]),
        *(_in_mib(held[kind]) for kind in KINDS),
        _in_mib(total),
        f"{total / plain:.3f}",
        f"{readable_time(times['median'])} [dim]{spread}[/dim]",
        f"{times['median'] / first['times_s']['median']:.2f}" if first["ranks"] == 1 else "",
    ]


def _in_mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.2f} MiB"


def judge_scaling(rows: Sequence[Row], num_cores: int) -> Iterator[tuple[str, list[Verdict]]]:
    """Memory follows the formula; where there are cores, twice the ranks take half the time."""
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        verdicts = [_memory_verdict(row, kind) for row in mine for kind in KINDS]
        yield f"{strategy}: memory on a rank within {PADDING} of the formula", verdicts
    medians = {(row["strategy"], row["ranks"]): row["times_s"]["median"] for row in rows}
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        four, eight = (medians.get((strategy, ranks)) for ranks in (4, 8))
        verdicts = []
        if four is not None and eight is not None and num_cores >= 8:
            text = f"{readable_time(four)} on 4 ranks, {readable_time(eight)} on 8"
            verdicts = [Verdict(eight <= four / 2, text)]
        yield f"{strategy}: twice as fast from 4 to 8 ranks, given 8 cores", verdicts


def _memory_verdict(row: Row, kind: str) -> Verdict:
    allowed = PADDING * whole_bytes(row, kind) * share(row["strategy"], kind, row["ranks"])
    held = row["held_bytes"][kind]
    text = f"{row['ranks']} ranks, {kind}: {_in_mib(held)}, allowed {_in_mib(int(allowed))}"
    return Verdict(held <= allowed, text)


def exposed_s(row: Row, name: str) -> float:
    """See [Note: exposed communication] in `grouping`."""
    times = row["times_s"]
    return float(times[name]["median"] - times[SILENT]["median"])


def grouping_table(row: Row) -> Table:
    """One line for each way to group."""
    title = f"ZeRO-3 on {row['chain']}, {row['ranks']} processes over {row['backend']}"
    table = Table(title=title, title_justify="left")
    for name in ("", "groups", "step", "quartiles", "exposed communication", "overhead"):
        table.add_column(name, justify="right" if name else "left")
    for name, times in row["times_s"].items():
        exposed = exposed_s(row, name)
        told = [readable_time(exposed), f"{exposed / row['times_s'][SILENT]['median']:.0%}"]
        table.add_row(
            name,
            str(row["groups"].get(name, "")),
            readable_time(times["median"]),
            f"{readable_time(times['low'])} to {readable_time(times['high'])}",
            *(told if name != SILENT else ("", "")),
        )
    return table


def judge_grouping(rows: Sequence[Row]) -> Iterator[tuple[str, list[Verdict]]]:
    """Grouping takes most of the communication out of the way."""
    verdicts = []
    for row in rows:
        grouped, ungrouped = exposed_s(row, GROUPED), exposed_s(row, UNGROUPED)
        text = f"{row['chain']}: {readable_time(grouped)} instead of {readable_time(ungrouped)}"
        text += f", {ungrouped / grouped:.1f} times less" if grouped > 0 else ""
        verdicts.append(Verdict(grouped * TIMES_LESS_EXPOSED <= ungrouped, text))
    yield f"grouping: at least {TIMES_LESS_EXPOSED} times less exposed communication", verdicts

"""`shoal demo --tour comm`: what ranks can do together, over every transport that is here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoal.cli.demo.tour import Heard, Visit

_RANKS = 4
_TIMEOUT_S = 60.0
_SIZES = (64 << 10, 1 << 20, 16 << 20)
_BACKENDS = {
    "memory": "threads of this process that take turns",
    "shm": "processes, over shared memory",
    "gloo": "processes, over Gloo's sockets",
    "mpi": "processes that mpiexec starts, over MPI",
}

_FAILURE = """\
import shoal, torch

def train():
    world = shoal.world()
    for step in range(3):
        if world.rank == 2 and step == 1:
            raise OSError("no space left on device")
        world.all_reduce(torch.ones(1000))
"""

_MISMATCH = """\
import shoal, torch

def train():
    world = shoal.world()
    if world.rank == 1:
        world.all_reduce(torch.ones(8), "max")
    else:
        world.all_reduce(torch.ones(8))
"""


def show_communication(console: Console) -> None:
    """Every collective on four ranks, what happens when something goes wrong, bandwidths."""
    visits = _visit_all(console)
    backend = next(name for name in ("shm", "gloo", "memory") if name in visits)
    _show_failure(console, backend)
    _show_mismatch(console, backend)
    console.rule("[bold]How fast it was", align="left")
    console.print(_bandwidths(visits))
    console.print(
        f"{_RANKS} ranks, median of 5, on memory from Backend.empty; MB of tensor per second. "
        "A benchmark with alternating contenders: make bench.",
        style="dim",
    )


# The collectives ------------------------------------------------------------------------


def _visit_all(console: Console) -> dict[str, list[Visit]]:
    visits: dict[str, list[Visit]] = {}
    for backend, meaning in _BACKENDS.items():
        begin = time.perf_counter()
        found = _visit(console, backend)
        if found is None:
            continue
        visits[backend] = found
        if len(visits) == 1:
            console.rule(f"[bold]Every collective, on {_RANKS} ranks", align="left")
            console.print(_collectives(found))
        seconds = time.perf_counter() - begin
        console.print(f"[bold]{backend:7}[/bold]{meaning}: {_verdict(visits)} ({seconds:.1f} s)")
    return visits


def _visit(console: Console, backend: str) -> list[Visit] | None:
    from shoal.api import run
    from shoal.cli.demo.tour import visit
    from shoal.errors import BackendUnavailableError, LaunchError

    try:
        return run(visit, _RANKS, backend, args=(_SIZES,), timeout=_TIMEOUT_S)
    except (BackendUnavailableError, LaunchError) as error:
        console.print(f"[bold]{backend:7}[/bold]left out: {error}")
        return None


def _verdict(visits: dict[str, list[Visit]]) -> str:
    first, *others = visits.values()
    if not others:
        return "the table above"
    last = others[-1]
    if [visit.shown for visit in last] != [visit.shown for visit in first]:
        return "[red]other results[/red]"
    return "[green]the same results[/green]"


def _collectives(visits: list[Visit]) -> Table:
    from rich.table import Table

    table = Table(caption="what each rank gave > what it got", caption_justify="left")
    table.add_column("operation", no_wrap=True)
    for rank in range(len(visits)):
        table.add_column(f"rank {rank}")
    for shown in zip(*(visit.shown for visit in visits), strict=True):
        cells = [f"{each.given} [dim]>[/dim] [cyan]{each.got}[/cyan]" for each in shown]
        table.add_row(shown[0].call, *cells)
    return table


# What goes wrong ------------------------------------------------------------------------


def _show_failure(console: Console, backend: str) -> None:
    outcomes = _play(console, "A rank fails; the others say so", _FAILURE, backend)
    culprit = next(outcome for outcome in outcomes if outcome.failed)
    console.print(f"rank {culprit.rank} raised [red]{culprit.error!r}[/red]")
    for outcome in outcomes:
        if not outcome.failed:
            heard: Heard = outcome.value
            late_ms = 1e3 * (heard.at - getattr(culprit.error, "raised_at", heard.at))
            console.print(f"rank {outcome.rank}, {late_ms:.0f} ms later: {_error(heard)}")


def _show_mismatch(console: Console, backend: str) -> None:
    outcomes = _play(console, "Ranks disagree; nothing is moved", _MISMATCH, backend)
    heard: list[Heard] = [outcome.value for outcome in outcomes]
    same = len({each.text for each in heard}) == 1
    console.print(f"{'every rank' if same else 'rank 0'}: {_error(heard[0])}")


def _play(console: Console, title: str, source: str, backend: str) -> list[Any]:
    from rich.syntax import Syntax

    from shoal.cli.demo.tour import play
    from shoal.launch.function.run import run_outcomes

    console.rule(f"[bold]{title} ({backend})", align="left")
    console.print(Syntax(source.rstrip(), "python", line_numbers=True, background_color="default"))
    return run_outcomes(play, (source,), _RANKS, backend, _TIMEOUT_S)


def _error(heard: Heard) -> str:
    from rich.markup import escape

    return f"[red]{heard.kind}[/red]: {escape(heard.text)}"


# How fast it was ------------------------------------------------------------------------


def _bandwidths(visits: dict[str, list[Visit]]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("")
    measured = next(iter(visits.values()))[0].seconds
    columns = sorted(measured, key=lambda column: (column[0] != "all_reduce", column[1]))
    for operation, num_bytes in columns:
        size = f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
        table.add_column(f"{operation}\n{size}", justify="right")
    for backend, found in visits.items():
        times = found[0].seconds
        table.add_row(backend, *(_bandwidth(column[1], times[column]) for column in columns))
    return table


def _bandwidth(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 1e6 / seconds:,.0f} MB/s\n[dim]{1e3 * seconds:.2f} ms[/dim]"

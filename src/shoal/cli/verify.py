"""`shoal verify`: does a user's model train on many ranks as it does in one process?"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoal.strategies.option_types import Strategy
    from shoal.verification import Report


def verify_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:BUILD",
            help="A function that returns (model, optimizer, batches, loss_fn); file.py:build too.",
        ),
    ],
    strategy: Annotated[
        str,
        typer.Option(
            "-s",
            "--strategy",
            help="One, several with commas between, or all that are to equal one process.",
        ),
    ] = "all",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks.")] = 2,
    backend: Annotated[str, typer.Option(help="memory, shm, gloo, nccl or mpi.")] = "memory",
    steps: Annotated[int, typer.Option(help="How many steps to train.")] = 5,
    reference: Annotated[
        str, typer.Option(help="batch: one process on the whole batch; split: on the ranks' parts.")
    ] = "batch",
    tolerance: Annotated[
        float | None, typer.Option(help="What an element may be off by; default: by its dtype.")
    ] = None,
) -> None:
    """Train one process and many ranks on the same batches; exit code 1 if they differ.

    With "all", a strategy that cannot hold this model on so many ranks is shown as refused.
    """
    from rich.console import Console

    from shoal.api import verify

    strategies = _strategies(strategy)
    _check(reference, backend)
    build = _load(target)
    console = Console(highlight=False)
    reports: list[Report] = []
    refusals: dict[str, Exception] = {}
    for name in strategies:
        with console.status(f"training {name} on {ranks} ranks over {backend} ..."):
            try:
                how = (ranks, backend, steps, reference, tolerance)
                reports.append(verify(build, cast("Strategy", name), *how))
            except (ShoalError, TypeError, ValueError) as error:
                if not reports:  # nothing has worked: it is hardly this strategy that is at fault
                    raise
                refusals[name] = error
    _show(console, reports, refusals)
    is_right = all(report.equal for report in reports) and (strategy == "all" or not refusals)
    raise typer.Exit(0 if is_right else 1)


def _strategies(wanted: str) -> list[str]:
    from shoal.optim import INDEPENDENT, PAIRS

    equal = [name for name in PAIRS if name not in INDEPENDENT]
    names = equal if wanted == "all" else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in PAIRS:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(PAIRS)}, all", param_hint="--strategy"
            )
    return names


def _check(reference: str, backend: str) -> None:
    from shoal.launch.joining.join import check_name
    from shoal.verification.experiment import REFERENCES

    if reference not in REFERENCES:
        raise typer.BadParameter(
            f"{reference!r} is none of {', '.join(REFERENCES)}", param_hint="--reference"
        )
    try:
        check_name(backend)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from None


def _load(target: str) -> Callable[[], Any]:
    """The function behind ``package.module:function`` or ``file.py:function``."""
    module_name, separator, name = target.rpartition(":")
    if not separator:
        raise typer.BadParameter(f"need module:function or file.py:function; got {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        load = _load_file if module_name.endswith(".py") else importlib.import_module
        module = load(module_name)
        build = getattr(module, name)
    except (ModuleNotFoundError, FileNotFoundError, AttributeError) as error:
        raise typer.BadParameter(f"cannot load {target!r}: {error}") from error
    if not callable(build):
        raise typer.BadParameter(f"{target!r} is a {type(build).__name__}, not a function")
    return build  # type: ignore[no-any-return]


def _load_file(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _show(console: Console, reports: list[Report], refusals: Mapping[str, Exception]) -> None:
    console.print(_table(reports, refusals))
    # Strategies that fail for the same reason should say so once.
    for cause in dict.fromkeys(report.cause for report in reports if report.cause):
        console.print(f"likely cause: {cause}", markup=False, soft_wrap=True)
    for note in dict.fromkeys(note for report in reports for note in report.notes):
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for name, error in refusals.items():
        console.print(f"{name} is refused: {error}", markup=False, soft_wrap=True)


def _table(reports: list[Report], refused: Iterable[str]) -> Table:
    from rich.table import Table

    first = reports[0]
    table = Table(
        caption=f"{first.ranks} ranks over {first.backend}, reference {first.reference!r}, "
        f"{first.steps} steps, tolerance {first.tolerance:g}",
        caption_justify="left",
    )
    for column in ("strategy", "equal?", "loss", "gradients", "parameters", "first difference"):
        table.add_column(column)
    for report in reports:
        table.add_row(*_row(report))
    for name in refused:
        table.add_row(name, "[yellow]refused[/yellow]", "-", "-", "-", "-")
    return table


def _row(report: Report) -> tuple[str, ...]:
    from shoal.verification.experiment import describe

    verdict = "[green]yes[/green]" if report.equal else "[red]no[/red]"
    sizes = (f"{report.largest[kind]:.0e}" for kind in ("loss", "gradient", "parameter"))
    return (
        report.strategy,
        verdict,
        *sizes,
        describe(report.difference) if report.difference else "-",
    )

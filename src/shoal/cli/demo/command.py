"""`shoal demo`: training under every strategy, or a tour of the collectives."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console


class Tour(StrEnum):
    """What there is to see."""

    TRAINING = "training"
    COMMUNICATION = "comm"


def demo_command(
    tour: Annotated[
        Tour, typer.Option(help="A small GPT under every strategy, or every collective.")
    ] = Tour.TRAINING,
    steps: Annotated[int, typer.Option(min=3, help="Steps of training.")] = 15,
) -> None:
    """Train a small GPT on four ranks under every strategy, and compare with one process."""
    console = _console()
    if tour is Tour.COMMUNICATION:
        from shoal.cli.demo.communication import show_communication

        show_communication(console)
    else:
        from shoal.cli.demo.training import show_training

        if not show_training(console, steps):
            raise typer.Exit(1)


def _console() -> Console:
    """Where output goes to a file there is no width to respect."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)

"""The front of the `shoal` command: its options, its subcommands, and how errors look.

Nothing here imports torch, so that `shoal --help` is quick.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from shoal.cli.checkpoints import export_command, inspect_command, reshard_command
from shoal.cli.demo.command import demo_command
from shoal.cli.launch import launch_command
from shoal.cli.verify import verify_command
from shoal.errors import ShoalError

app = typer.Typer(
    name="shoal",
    help="Distributed training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Distributed training for PyTorch."""


app.command(
    "launch",
    # What follows the script is the script's, whatever it looks like.
    context_settings={"allow_interspersed_args": False},
    no_args_is_help=True,
)(launch_command)
app.command("demo")(demo_command)
app.command("verify", no_args_is_help=True)(verify_command)
app.command("inspect", no_args_is_help=True)(inspect_command)
app.command("reshard", no_args_is_help=True)(reshard_command)
app.command("export", no_args_is_help=True)(export_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; a user's error is one message and exit code 2, not a traceback.

    Args:
        arguments: What to run instead of the words of the command line.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="shoal")
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)


def _version() -> str:
    try:
        return importlib.metadata.version("shoal")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"

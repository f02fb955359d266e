"""The front of the `shoal` command: its options and subcommands, launch and demo among them.

Nothing here imports torch, so that `shoal --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shoal import __version__
from shoal.cli.checkpoints import export_command, inspect_command, reshard_command
from shoal.cli.verify import verify_command
from shoal.errors import ShoalError
from shoal.launch.script.streams import (
    give_up_output,
    is_lost,
    is_of_output,
    open_closed_streams,
)

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="shoal",
    help="Distributed training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
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


def launch_command(
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, passed on exactly.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", "--nproc-per-node", help="Ranks on this node; default: 1, or --min."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module.")] = False,
    backend: Annotated[
        str | None, typer.Option(help="auto, shm, gloo, nccl or mpi; default: the script's.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", "--nnodes", help="Number of nodes.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where nodes meet: a port of node 0.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Write rank-K.log files here instead of the screen.")
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds others have to end after a failure or an interrupt.")
    ] = 10.0,
    elastic: Annotated[bool, typer.Option("--elastic", help="Ranks may come, go and die.")] = False,
    least: Annotated[
        int | None, typer.Option("--min", help="With fewer ranks an elastic run ends; default: 1.")
    ] = None,
    most: Annotated[int | None, typer.Option("--max", help="More are not let in.")] = None,
    spares: Annotated[
        int | None, typer.Option(help="Started besides, and wait until a rank is lost.")
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="How many are started anew after a loss, over the whole run.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join an elastic run that is under way.")
    ] = None,
) -> None:
    """Start ranks of a script: shoal launch -n 4 train.py --its arguments."""
    from shoal.launch.script.config import elastic_bounds
    from shoal.launch.script.launcher import LaunchConfig, launch

    config = LaunchConfig(
        script=script,
        args=tuple(args or ()),
        ranks=(least or 1) if ranks is None else ranks,
        module=module,
        backend=backend,
        nodes=nodes,
        node_rank=node_rank,
        master=master,
        log_dir=log_dir,
        grace=grace,
        elastic=elastic_bounds(elastic, least, most, spares, restarts),
        join=join,
    )
    code = launch(config)
    give_up_output()  # what is lost has been said; the code is the ranks'
    raise typer.Exit(code)


class Tour(StrEnum):
    """What there is to see."""

    TRAINING = "training"
    COMMUNICATION = "comm"


def demo_command(
    tour: Annotated[
        Tour, typer.Option(help="A small GPT under every strategy, or collectives.")
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
    """Runs the command; a user's error is one message and exit code 2, not a traceback."""
    open_closed_streams()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="shoal")
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not is_of_output(error):
            raise
        give_up_output()
        _refuse_output(error)
    except SystemExit:
        lost = give_up_output()
        if lost is None:
            raise
        _refuse_output(lost)


def _refuse_output(error: OSError) -> NoReturn:
    if is_lost(error):
        print(f"shoal: the output cannot be written: {error.strerror}.", file=sys.stderr)
    sys.exit(2)

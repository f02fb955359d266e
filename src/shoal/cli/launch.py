"""`shoal launch`: the options of a launch, handed to `shoal.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def launch_command(
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, passed on exactly.")
    ] = None,
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", "--nproc-per-node", help="Ranks on this node.")
    ] = 1,
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
) -> None:
    """Start ranks of a script: shoal launch -n 4 train.py --its arguments."""
    from shoal.launch.script.launcher import LaunchConfig, launch

    config = LaunchConfig(
        script=script,
        args=tuple(args or ()),
        ranks=ranks,
        module=module,
        backend=backend,
        nodes=nodes,
        node_rank=node_rank,
        master=master,
        log_dir=log_dir,
        grace=grace,
    )
    raise typer.Exit(launch(config))

"""What `shoal launch` was asked to start, checked before anything starts, and the ranks' variables.

Those carry torchrun's names, so that a script written for torchrun runs as it is.
`shoal.launch.joining.environment` reads them back.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.rank_settings import rank_settings
from shoal.meeting.address import MEETING_VARIABLE

BACKENDS = ("auto", "shm", "gloo", "nccl", "mpi")


@dataclass(frozen=True)
class LaunchConfig:
    """Ranks to start: `ranks` on this node, on each of `nodes` nodes.

    Example:
        >>> LaunchConfig("train.py", ("--lr", "0.1"), ranks=4, nodes=2, master="host-a:29500").size
        8
    """

    script: str
    """A path, or the dotted name of a module when `module` is set."""
    args: tuple[str, ...] = ()
    ranks: int = 1
    module: bool = False
    backend: str | None = None
    nodes: int = 1
    node_rank: int = 0
    master: str | None = None
    """HOST:PORT where the ranks of all nodes meet. One node needs none, and uses only the port."""
    log_dir: Path | None = None
    grace: float = 10.0
    """Seconds that the others have to end by themselves after a failure or an interrupt."""
    host: str = field(init=False, default="127.0.0.1")
    port: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        _refuse_counts(self)
        _refuse_backend(self)
        if self.nodes > 1 and self.master is None:
            raise LaunchError(
                f"{self.nodes} nodes must know where to meet, but no master was given. "
                "Add --master HOST:PORT with the address of node 0, the same on every node."
            )
        if self.master is not None:
            host, port = _parse_master(self.master, lowest=0 if self.nodes == 1 else 1)
            object.__setattr__(self, "port", port)
            if self.nodes > 1:
                object.__setattr__(self, "host", host)

    @property
    def size(self) -> int:
        """The number of ranks over all nodes."""
        return self.nodes * self.ranks

    @property
    def first_rank(self) -> int:
        """The first rank of this node."""
        return self.node_rank * self.ranks

    def command(self) -> list[str]:
        """The command of a rank: a list from end to end, so no shell ever splits an argument."""
        target = ["-m", self.script] if self.module else [self.script]
        return [sys.executable, "-u", *target, *self.args]

    def refuse_missing_script(self) -> None:
        """Looks for the script or module now, instead of once in every rank."""
        if self.module:
            _refuse_missing_module(self.script)
        elif os.path.isdir(self.script):
            raise LaunchError(
                f"The script must be a Python file, but {self.script!r} is a directory. "
                "Name a file in it, or start a package with -m PACKAGE."
            )
        elif not os.path.exists(self.script):
            raise LaunchError(
                f"The script must exist, but there is no {self.script!r} in {os.getcwd()}. "
                "Check the path, or start a module with -m MODULE."
            )


def _refuse_counts(config: LaunchConfig) -> None:
    if config.ranks < 1:
        raise LaunchError(
            f"At least one rank must be started, but {config.ranks} were asked for. "
            "Use -n 1 or more."
        )
    if config.nodes < 1:
        raise LaunchError(
            f"At least one node must take part, but --nodes is {config.nodes}. Use 1 or more."
        )
    if not 0 <= config.node_rank < config.nodes:
        raise LaunchError(
            f"--node-rank must be from 0 to {config.nodes - 1} for {config.nodes} node(s), but it "
            f"is {config.node_rank}. Count nodes from 0, or set --nodes to their number."
        )
    if not config.grace >= 0:
        raise LaunchError(f"--grace must be 0 seconds or more, but it is {config.grace}.")


def _refuse_backend(config: LaunchConfig) -> None:
    if config.backend == "memory":
        raise LaunchError(
            'The ranks of backend "memory" are threads of one process, and launch starts '
            'processes. Use shoal.run(fn, ranks=..., backend="memory"), or --backend shm.'
        )
    if config.backend is not None and config.backend not in BACKENDS:
        raise LaunchError(
            f"--backend must be one of {', '.join(BACKENDS)}, but it is {config.backend!r}."
        )
    if config.backend == "mpi" and config.nodes > 1:
        raise LaunchError(
            f"--backend mpi starts ranks on one node, but --nodes is {config.nodes}. Across nodes, "
            "start the script with the cluster's own mpirun or srun: shoal finds its ranks there."
        )


def _parse_master(text: str, lowest: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    fits = port.isdecimal() and lowest <= int(port) < 65_536
    if not (colon and host and fits):
        raise LaunchError(
            f"--master must be HOST:PORT with a port from {lowest} to 65535, but it is {text!r}. "
            "For example: --master 10.0.0.1:29500"
        )
    return host, int(port)


def _refuse_missing_module(name: str) -> None:
    package = name.partition(".")[0]
    # `python -m` looks in the current directory first, which the launcher's own path may lack.
    here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    if here is None and (not package or importlib.util.find_spec(package) is None):
        raise LaunchError(
            f"The module must be importable, but there is no {package!r} in {os.getcwd()} or among "
            "the installed packages. Check the name, or leave out -m to start a file."
        )


def common_variables(
    config: LaunchConfig,
    master: tuple[str, int],
    meeting: str,
    error_dir: Path,
    env: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """What all ranks of this node share; what the user exported about threads is kept.

    ``meeting`` is where shoal's ranks meet, ``master`` where a store of torch's own may be.
    """
    run_id = env.get("SHOAL_RUN_ID") or _run_id(config)
    variables = {
        "WORLD_SIZE": str(config.size),
        "LOCAL_WORLD_SIZE": str(config.ranks),
        "GROUP_RANK": str(config.node_rank),
        "GROUP_WORLD_SIZE": str(config.nodes),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        MEETING_VARIABLE: meeting,
        "SHOAL_LAUNCHED": "1",
        "SHOAL_RUN_ID": run_id,
        "SHOAL_ERROR_DIR": str(error_dir),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The launcher has no store of torch's: rank 0 holds one if the script asks for it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONUNBUFFERED": "1",
        **rank_settings(config.ranks, env),
    }
    if config.backend is not None:
        variables["SHOAL_BACKEND"] = config.backend
    return variables


def own_variables(config: LaunchConfig, local_rank: int) -> dict[str, str]:
    """What tells one rank from its neighbours."""
    return {"RANK": str(config.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}


def _run_id(config: LaunchConfig) -> str:
    """Unique on one node; on several, all launchers must arrive at the same without talking."""
    return secrets.token_hex(8) if config.nodes == 1 else f"{config.host}-{config.port}"

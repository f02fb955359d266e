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
from shoal.meeting.address import MEETING_VARIABLE, elastic_address, is_this_host
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import PERSON_VARIABLE

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
    elastic: Elastic | None = None
    """Within which bounds ranks may come and go, if they may. With a `master` from other hosts."""
    join: str | None = None
    """HOST:PORT of an elastic run that the ranks join, as its launcher tells it."""
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
            lowest = 0 if self.nodes == 1 and self.elastic is None else 1
            host, port = _parse_place("--master", self.master, lowest)
            object.__setattr__(self, "port", port)
            if self.nodes > 1 or (self.elastic is not None and not is_this_host(host)):
                object.__setattr__(self, "host", host)
        if self.elastic is not None:
            _refuse_elastic(self, self.elastic)
            if self.is_between_hosts:
                object.__setattr__(self, "backend", "gloo")
        if self.join is not None:
            _refuse_join(self)

    @property
    def is_between_hosts(self) -> bool:
        """Whether ranks of other hosts may come."""
        return self.nodes > 1 or not is_this_host(self.host)

    @property
    def run_address(self) -> str:
        """Where the elastic run meets that is to be joined."""
        assert self.join is not None
        return elastic_address(*_parse_place("--join", self.join, lowest=1))

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
        return [sys.executable, "-u", *self.target()]

    def target(self) -> list[str]:
        """The script and its arguments, as they were given."""
        return [*(["-m"] if self.module else []), self.script, *self.args]

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


def elastic_bounds(
    is_elastic: bool, least: int | None, most: int | None, spares: int | None, restarts: int | None
) -> Elastic | None:
    """From the command line's options, of which none is for other runs."""
    if is_elastic:
        return Elastic(1 if least is None else least, most, spares or 0, restarts or 0)
    if any(each is not None for each in (least, most, spares, restarts)):
        raise LaunchError("--min, --max, --spares and --restarts go with --elastic: add it.")
    return None


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


def _refuse_elastic(config: LaunchConfig, bounds: Elastic) -> None:
    most = config.ranks if bounds.max_ranks is None else bounds.max_ranks
    if not 1 <= bounds.min_ranks <= config.ranks <= most:
        shown = "" if bounds.max_ranks is None else f" --max {bounds.max_ranks}"
        raise LaunchError(
            f"An elastic run begins with at least --min ranks, which is 1 or more, and at most "
            f"--max, but there are -n {config.ranks} --min {bounds.min_ranks}{shown}."
        )
    if bounds.spares < 0 or bounds.restarts < 0:
        raise LaunchError(
            f"--spares and --restarts must be 0 or more, but they are {bounds.spares} and "
            f"{bounds.restarts}."
        )
    if config.nodes > 1:
        raise LaunchError(
            "An elastic run is started on one host, without --nodes. Ranks of other hosts join it: "
            "start it with --master HOST:PORT, and there: shoal launch --join HOST:PORT SCRIPT"
        )
    if config.backend == "mpi" and (bounds.spares or bounds.restarts or most > config.ranks):
        raise LaunchError(
            "Over MPI ranks can go and not come: leave out --spares, --restarts and a --max above "
            "-n, or choose --backend shm or gloo."
        )
    carriers = ("auto", "gloo") if config.is_between_hosts else ("auto", "shm", "gloo", "mpi")
    if config.backend is not None and config.backend not in carriers:
        where = " between hosts" if config.is_between_hosts else ""
        raise LaunchError(
            f"Ranks that come and go{where} communicate over {' or '.join(carriers[1:])}, but "
            f"--backend is {config.backend}."
        )


def _refuse_join(config: LaunchConfig) -> None:
    if config.elastic is not None or config.nodes > 1 or config.master or config.backend:
        raise LaunchError(
            "Ranks that --join an elastic run do as it does: leave out --elastic, --nodes, "
            "--master and --backend."
        )
    _parse_place("--join", config.join or "", lowest=1)


def _parse_place(option: str, text: str, lowest: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    fits = port.isdecimal() and lowest <= int(port) < 65_536
    if not (colon and host and fits):
        raise LaunchError(
            f"{option} must be HOST:PORT with a port from {lowest} to 65535, but it is {text!r}. "
            f"For example: {option} 10.0.0.1:29500"
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
        PERSON_VARIABLE: "",  # that of an elastic worker in which this launch may run
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

"""Which rank is this process? Found from the variables that its launcher left.

Each launcher speaks a *dialect*: its own names for the same few numbers. A dialect is a row in
`_DIALECTS`, asked from the innermost launcher to the outermost, because they nest: torchrun inside
an srun step has the variables of both, and torchrun is right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shoal.errors import LaunchError
from shoal.meeting.roster import PERSON_VARIABLE

Environment = Mapping[str, str]

# Slurm gives the steps that are not `srun` steps (batch script, extern, interactive shell)
# ids at the very top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Below the range from which systems draw ephemeral ports, so no process is given one by chance.
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000
_LOOPBACK = (None, "localhost", "::1")


@dataclass(frozen=True)
class RankInfo:
    """Who this process is among its peers.

    `master_addr` and `master_port` are None where the launcher names no meeting point. `source` is
    one of "shoal", "torchrun", "openmpi", "pmi", "slurm", "plain", "alone". MPI does not number
    hosts: there `node_rank` assumes that hosts are filled one after the other.

    Example:
        >>> discover({"RANK": "1", "WORLD_SIZE": "4"}).rank
        1
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    master_addr: str | None
    master_port: int | None
    source: str


ALONE = RankInfo(0, 1, 0, 1, 0, None, None, "alone")


@dataclass(frozen=True)
class _Dialect:
    """One launcher's names; where there are several for a number, the first that is set counts."""

    source: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    """Any of these set: the launcher was here."""
    whole: bool = False
    """Whether the launcher always sets every name, so that a missing one is an accident."""
    spoken: Callable[[Environment], bool] | None = None
    derived: Callable[[Environment], dict[str, str]] = lambda env: {}

    def is_spoken(self, env: Environment) -> bool:
        if self.spoken is not None:
            return self.spoken(env)
        return any(env.get(name) for name in self.marks)


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether this process is one of the tasks that `srun` started.

    The body of an sbatch script has the variables of a task 0 among `SLURM_NTASKS`, but it runs
    once: to take it for a rank would make it wait for peers that never come.
    """
    if not env.get("SLURM_PROCID"):
        return False
    step = env.get("SLURM_STEP_ID")
    if not step:
        return env.get("ENVIRONMENT") != "BATCH"
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _slurm_derived(env: Mapping[str, str]) -> dict[str, str]:
    """The variables as other launchers would have set them, where Slurm only implies them.

    `SLURM_STEP_TASKS_PER_NODE` becomes the count of this node alone. A master that the user named
    is kept.
    """
    found: dict[str, str] = {}
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if hosts:
        found["MASTER_ADDR"] = env.get("MASTER_ADDR") or first_host(hosts)
        found["MASTER_PORT"] = env.get("MASTER_PORT") or str(_slurm_port(env))
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not tasks and hosts and not re.search(r"[,\[]", hosts):  # one host has all of them
        tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")
    if tasks:
        here = _tasks_here(expand_counts(tasks), env.get("SLURM_NODEID") or "0")
        found["SLURM_STEP_TASKS_PER_NODE"] = str(here)
    return found


_PLAIN = _Dialect(
    "plain",
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    node_rank=("GROUP_RANK", "NODE_RANK"),
    marks=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)

_DIALECTS = (
    replace(_PLAIN, source="shoal", whole=True, marks=("SHOAL_LAUNCHED",)),
    replace(_PLAIN, source="torchrun", whole=True, marks=("TORCHELASTIC_RUN_ID",)),
    _Dialect(
        "openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ),
    _Dialect(
        "pmi",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
        marks=("PMI_RANK", "PMI_SIZE"),
        derived=lambda env: _slurm_derived(env) if _is_slurm_task(env) else {},
    ),
    _Dialect(
        "slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE",),
        node_rank=("SLURM_NODEID",),
        spoken=_is_slurm_task,
        derived=_slurm_derived,
    ),
    _PLAIN,
)


def discover(env: Environment = os.environ) -> RankInfo:
    """Finds which rank this process is, of how many; alone when no launcher left a trace.

    Ranks without local numbers are taken to share a host when the master is on loopback or not
    named, and to have a host each otherwise.

    Raises:
        LaunchError: If variables are missing, no numbers, out of range or contradict each other.
    """
    for dialect in _DIALECTS:
        if dialect.is_spoken(env):
            reader = _EnvironmentReader(dialect, {**env, **dialect.derived(env)})
            _refuse_contradiction(reader)
            return _read(reader, dialect.source)
    return ALONE


def own_number(env: Environment = os.environ) -> int:
    """By which number the launcher knows this process: its rank, where ranks do not change."""
    number = env.get(PERSON_VARIABLE)
    return int(number) if number else discover(env).rank


_OTHER_NAMES = (
    PERSON_VARIABLE,
    "SHOAL_MEETING",
    "SHOAL_ERROR_DIR",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_OF_JOB = re.compile(r"(OMPI_COMM_|TORCHELASTIC_|PMI_|(PMIX|PRTE)_(?!MCA_))")


def without_rank(env: Environment) -> dict[str, str]:
    """The variables without what says which rank this process is, for a launcher of its own.

    Settings of MPI and of Slurm stay: they tell of the machine.
    """
    names = {*_OTHER_NAMES}
    for each in _DIALECTS:
        names.update(each.rank, each.size, each.local_rank, each.local_size, each.node_rank)
        names.update(each.marks)
    return {
        name: value
        for name, value in env.items()
        if name.startswith("SLURM_") or not (name in names or _OF_JOB.match(name))
    }


def _read(reader: _EnvironmentReader, source: str) -> RankInfo:
    names = reader.names
    size = reader.needed(names.size, lowest=1)
    rank = reader.needed(names.rank, below=size)
    addr, port = _master(reader)
    local_rank, local_size = _local(reader, rank, size, addr)
    node_rank = reader.number(names.node_rank, below=size)
    if node_rank is None:
        node_rank = rank // local_size
    return RankInfo(rank, size, local_rank, local_size, node_rank, addr, port, source)


def _local(reader: _EnvironmentReader, rank: int, size: int, addr: str | None) -> tuple[int, int]:
    names = reader.names
    one_host = addr in _LOOPBACK or str(addr).startswith("127.")
    local_size = reader.number(names.local_size, lowest=1, below=size + 1)
    local_rank = reader.number(names.local_rank, below=local_size or size)
    if local_size is None:
        if local_rank is not None and not one_host:
            raise reader.missing(names.local_size)
        local_size = size if one_host else 1
    return (rank % local_size if local_rank is None else local_rank), local_size


def _master(reader: _EnvironmentReader) -> tuple[str | None, int | None]:
    """Both or neither where the launcher is one that names a master; MPI and Slurm need none."""
    addr = reader.env.get("MASTER_ADDR") or None
    port = reader.number(("MASTER_PORT",), lowest=1, below=65_536)
    if reader.names is _PLAIN and (addr is None) != (port is None):
        raise reader.missing(("MASTER_ADDR",) if addr is None else ("MASTER_PORT",))
    if reader.names.whole and addr is None:
        raise reader.missing(("MASTER_ADDR",))
    return addr, port


@dataclass(frozen=True)
class _EnvironmentReader:
    """Reads numbers under a dialect's names, and knows what to say when they are wrong."""

    names: _Dialect
    env: Environment

    def number(self, names: tuple[str, ...], *, lowest: int = 0, below: int = 2**31) -> int | None:
        """The first of `names` that is set, as a number in [lowest, below)."""
        name = self.first_set(names)
        if name is None:
            if self.names.whole:
                raise self.missing(names)
            return None
        text = self.env[name].strip()
        if not text.isdecimal() or not lowest <= int(text) < below:
            raise LaunchError(
                f"{name} must be a whole number from {lowest} to {below - 1}, but it is {text!r} "
                f"(launcher: {self.names.source}). Set it right, or {self._way_out()}."
            )
        return int(text)

    def needed(self, names: tuple[str, ...], *, lowest: int = 0, below: int = 2**31) -> int:
        value = self.number(names, lowest=lowest, below=below)
        if value is None:
            raise self.missing(names)
        return value

    def first_set(self, names: tuple[str, ...]) -> str | None:
        """The first of `names` that has a value; an empty one counts as not set."""
        return next((name for name in names if self.env.get(name)), None)

    def missing(self, names: tuple[str, ...]) -> LaunchError:
        """What to tell a user whose launcher left only half of its variables."""
        return LaunchError(
            f"{names[0]} must be set, because other variables of the launcher "
            f"({self.names.source}) are, but it is missing. Export it for every rank, or "
            f"{self._way_out()}."
        )

    def _way_out(self) -> str:
        names = dict.fromkeys((*self.names.marks, *self.names.rank, *self.names.size))
        return f"unset {', '.join(names)} to run alone"


def _refuse_contradiction(reader: _EnvironmentReader) -> None:
    """Leftover RANK and WORLD_SIZE beside another launcher's numbers: who would be right?"""
    for plain, names in (("RANK", reader.names.rank), ("WORLD_SIZE", reader.names.size)):
        name = reader.first_set(names)
        if name is None or not reader.env.get(plain):
            continue
        if reader.env[plain].strip() != reader.env[name].strip():
            raise LaunchError(
                f"{plain} and {name} must agree, but {plain}={reader.env[plain]} and "
                f"{name}={reader.env[name]}. Unset {plain} if it is left over from another run, "
                "or set both alike."
            )


# Slurm ------------------------------------------------------------------------------------
#
# It writes lists in short: task counts as ``2(x2),1`` and hosts as ``node[03-05,9]``.


def expand_counts(text: str) -> list[int]:
    """Writes a list of counts out in full.

    Example:
        >>> expand_counts("2(x2),1")
        [2, 2, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE must look like '2(x2),1', but it is {text!r}. "
                "Start the script with srun, or unset the SLURM_* variables to run alone."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """The first host of a list in Slurm's short form.

    Example:
        >>> first_host("rack[2-4]-node[03-05,9],login")
        'rack2-node03'
    """
    host = re.split(r",(?![^\[]*\])", text, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", host)


def _tasks_here(counts: list[int], node: str) -> int:
    if not node.isdecimal() or int(node) >= len(counts):
        raise LaunchError(
            f"SLURM_NODEID must name one of the {len(counts)} nodes in SLURM_STEP_TASKS_PER_NODE, "
            f"but it is {node!r}. Start the script with srun, or unset the SLURM_* variables."
        )
    return counts[int(node)]


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port that all tasks of a step arrive at and two steps of a job seldom share."""
    job, step = (
        int(text) if text.isdecimal() else 0
        for text in (env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", ""))
    )
    return _FIRST_PORT + (31 * job + step) % _NUM_PORTS

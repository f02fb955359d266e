"""What Slurm's variables say about a task: is it one, who sits beside it, where is the first host.

Slurm writes lists in short: task counts as ``2(x2),1`` and hosts as ``node[03-05,9]``.
These are pure functions over an environment; `shoal.launch.joining.environment` asks them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.errors import LaunchError

# Slurm gives the steps that are not `srun` steps (batch script, extern, interactive shell)
# ids at the very top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Below the range from which systems draw ephemeral ports, so no process is given one by chance.
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000


def is_task(env: Mapping[str, str]) -> bool:
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


def derived(env: Mapping[str, str]) -> dict[str, str]:
    """The variables as other launchers would have set them, where Slurm only implies them.

    `SLURM_STEP_TASKS_PER_NODE` becomes the count of this node alone. A master that the user named
    is kept.
    """
    found: dict[str, str] = {}
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if hosts:
        found["MASTER_ADDR"] = env.get("MASTER_ADDR") or first_host(hosts)
        found["MASTER_PORT"] = env.get("MASTER_PORT") or str(_port(env))
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not tasks and hosts and not re.search(r"[,\[]", hosts):  # one host has all of them
        tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")
    if tasks:
        here = _tasks_here(expand_counts(tasks), env.get("SLURM_NODEID") or "0")
        found["SLURM_STEP_TASKS_PER_NODE"] = str(here)
    return found


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


def _port(env: Mapping[str, str]) -> int:
    """A port that all tasks of a step arrive at and two steps of a job seldom share."""
    job, step = (
        int(text) if text.isdecimal() else 0
        for text in (env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", ""))
    )
    return _FIRST_PORT + (31 * job + step) % _NUM_PORTS

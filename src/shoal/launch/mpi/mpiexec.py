"""How to call the `mpiexec` of this machine so that many ranks on few cores live and die well."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from shoal.errors import LaunchError

_VERSION_TIMEOUT = 60.0


def command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """The beginning of a command line that starts `ranks` processes on this host.

    More ranks than cores are allowed, none is bound to a core, waiting ranks yield, root may run
    them, and the environment of `mpiexec` is that of the ranks (both implementations pass all of
    it on to processes of their own host).

    When a rank dies the others go on, so that they can say why they stop. MPICH tells them with
    SIGUSR1, which kills a process that does not expect it: let them ignore that signal.

    Returns:
        The words before the program's own, and variables to set for `mpiexec`.

    Raises:
        LaunchError: If there is no `mpiexec`, or an unknown one.
    """
    program = find()
    version = _version(program)
    if match := re.search(r"\((?:Open MPI|OpenRTE)\)\s+(\d+)", version):
        words, variables = _open_mpi(int(match[1]))
    elif "HYDRA" in version.upper() or "Intel(R) MPI" in version:
        words, variables = ["-launcher", "fork", "-bind-to", "none", "-disable-auto-cleanup"], {}
    else:
        raise LaunchError(
            f"mpiexec must be Open MPI's or MPICH's, but {program} --version says "
            f"{version.strip()[:200]!r}. Put another first on PATH, or pip install 'shoal[mpi]'."
        )
    return [*_usable_umask(), program, *words, "-n", str(ranks)], variables


def _usable_umask() -> list[str]:
    """Words before a command that makes folders and writes to them, as MPI does for a run.

    Under an umask that takes permissions from the owner it could not. Its ranks have them, too.
    """
    status = Path("/proc/self/status").read_text()
    umask = int(status.partition("Umask:")[2].split()[0], 8)
    return ["/bin/sh", "-c", 'umask u=rwx; exec "$0" "$@"'] if umask & 0o700 else []


def find() -> str:
    """The `mpiexec` next to this Python, which fits its mpi4py, else the first on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise LaunchError(
            "Backend 'mpi' starts its ranks through mpiexec, but there is none next to "
            f'{sys.executable} or on PATH. Install one with: pip install "shoal[mpi]"'
        )
    return program


def _open_mpi(major: int) -> tuple[list[str], dict[str, str]]:
    words = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    recovery = ["--with-ft", "ulfm"] if major >= 5 else ["--enable-recovery"]
    return words + recovery, {"OMPI_MCA_mpi_yield_when_idle": "1"}


@functools.cache
def _version(program: str) -> str:
    try:
        answer = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"mpiexec must run, but {program} --version failed: {error}. "
            'Install one with: pip install "shoal[mpi]"'
        ) from error
    return answer.stdout + answer.stderr

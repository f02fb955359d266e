"""No rank outlives the launcher, not even one that was killed with -9.

Two nets, for each has a hole. The kernel's parent-death signal reaches a rank at once, but not
the processes that the rank started. The guard, a shell that waits for the end of a pipe which only
the launcher holds open, kills whole process groups, but learns of a rank a moment after its birth.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shoal.system import libc

# Each line replaces the list of groups. Reading on to the end of input means: the launcher died.
_SHELL = """
while read -r line; do groups=$line; done
[ -z "$groups" ] || kill -s KILL -- $groups
rm -rf -- "$1"
"""


class Guard:
    """Ends the process groups it was last told of, and removes `folder`, if the launcher dies."""

    def __init__(self, folder: Path) -> None:
        """Starts the shell, in a session of its own so that no Ctrl-C reaches it."""
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, "shoal-guard", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Replaces the list of groups to end."""
        assert self._shell.stdin is not None
        line = " ".join(f"-{group}" for group in groups)
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(f"{line}\n".encode())
            self._shell.stdin.flush()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Dismisses the guard: the launcher has ended everything by itself."""
        self._shell.kill()
        self._shell.communicate()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of what a dead rank leaves, instead of process 1; Linux only.

    In a container process 1 often reaps no process, and a group of zombies looks like one that
    lives.
    """
    libc.adopt_orphans(True)
    try:
        yield
    finally:
        libc.adopt_orphans(False)


def spawn(
    command: Sequence[str],
    *,
    stdin: int | None,
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a process that leads a session of its own and that the kernel kills with its parent.

    The kernel takes the *thread* that called this for the parent, so it must live as long as the
    process is needed.
    """
    with warnings.catch_warnings():
        # Python warns of forks beside threads. Between fork and exec ours makes two system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=libc.killed_with(os.getpid()),
        )

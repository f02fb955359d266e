"""No rank outlives the launcher, not even one that was killed with -9.

Two nets, for each has a hole. The kernel's parent-death signal reaches a rank at once, but not
the processes that the rank started. The guard, a shell that waits for the end of a pipe which only
the launcher holds open, kills whole process groups, but learns of a rank a moment after its birth.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1

# Each line replaces the list of groups. Reading on to the end of input means: the launcher died.
_SHELL = """
while read -r line; do groups=$line; done
[ -z "$groups" ] || kill -s KILL -- $groups
rm -rf -- "$1"
"""


class Guard:
    """Ends the process groups it was last told of, and removes `folder`, if the launcher dies.

    Example:
        >>> with Guard(scratch_folder) as guard:
        ...     guard.watch([process.pid])
    """

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
        """Returns the guard itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Dismisses the guard: the launcher has ended everything by itself."""
        self._shell.kill()
        self._shell.communicate()


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that asks the kernel to kill the child when its parent dies; Linux only.

    The kernel takes the *thread* that forked for the parent, so that thread must live as long as
    the child is needed.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork, only plain calls are safe
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return before_exec

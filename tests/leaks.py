"""What a test may leave behind: nothing.

A ``Footprint`` is what this process holds at one moment: Python threads, processes it has started
(and their descendants, wherever they were re-parented to), shared memory, open descriptors and
environment variables. A test is clean when its footprint afterwards has nothing that its baseline
lacked. A fixture that starts something meant to outlive the test (a pool of workers) calls
``baseline()`` when it is up.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

GRACE_SECONDS = 10.0

# Descendants are known by this variable, which they inherit and which outlives their parents.
TOKEN = f"SHOAL_TEST_RUN={os.getpid()}-{time.monotonic_ns()}"

# Of "7f00-7f01 rw-s 00000000 00:01 77 /memfd:x": the inode and the name.
SHARED_MAPPING = re.compile(r"s [0-9a-f]{8,} \S+ (\d+) +(.*)")
# Pinned host memory, which torch keeps for the next use, is a mapping of /dev/zero.
UNCOUNTED_FILES = ("/proc/", "/usr/", "/dev/nvidia", "/dev/urandom", "/dev/zero")
# The last two are set by libraries that transformers imports where it finds them.
UNCOUNTED_VARIABLES = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}


@dataclass(frozen=True)
class Footprint:
    """What this process holds now. Cheap: what costs time is left to ``beyond``."""

    threads: frozenset[threading.Thread] = field(
        default_factory=lambda: frozenset(threading.enumerate())
    )
    processes: frozenset[str] = field(default_factory=lambda: frozenset(_running()))
    segments: frozenset[str] = field(default_factory=lambda: frozenset(_segments()))
    descriptors: frozenset[str] = field(default_factory=lambda: frozenset(_descriptors()))
    environment: frozenset[tuple[str, str]] = field(
        default_factory=lambda: frozenset(os.environ.items())
    )

    def beyond(self, baseline: Footprint) -> list[str]:
        """One line for each thing that is here and was not in the baseline."""
        return [
            *(f"thread {thread.name!r}" for thread in self.threads - baseline.threads),
            *filter(None, map(_our_process, self.processes - baseline.processes)),
            *filter(None, map(_our_segment, self.segments - baseline.segments)),
            *(f"descriptor {name}" for name in self.descriptors - baseline.descriptors),
            *_changed_variables(baseline.environment, self.environment),
        ]


class Watch:
    """Holds a test to its baseline.

    Example:
        >>> watch = Watch()
        >>> run_the_test()
        >>> watch.leaks()
        ["thread 'Thread-1'"]
    """

    current: Watch | None = None

    def __init__(self) -> None:
        self.baseline = Footprint()

    def leaks(self, grace: float | None = None) -> list[str]:
        """What is left; things that are about to end get a moment to do so."""
        deadline = time.monotonic() + (GRACE_SECONDS if grace is None else grace)
        while Footprint().beyond(self.baseline):
            gc.collect()
            leaks = Footprint().beyond(self.baseline)
            if time.monotonic() >= deadline:
                return leaks
            time.sleep(0.01)
        return []


@contextlib.contextmanager
def watched(fail: Callable[[str], object]) -> Iterator[None]:
    """Calls ``fail`` with a message if the body leaves something behind."""
    watch, outer = Watch(), Watch.current
    Watch.current = watch
    try:
        yield
    finally:
        Watch.current = outer
        leaks = watch.leaks()
        _restore(watch.baseline.environment)
    if leaks:
        fail("the test left behind:\n" + "\n".join(f"  {leak}" for leak in sorted(leaks)))


def baseline() -> None:
    """Takes the running test's baseline anew: what there is now is no leak of its."""
    if Watch.current is not None:
        Watch.current.baseline = Footprint()


def mark_descendants() -> None:
    """Lets processes that tests start be recognized later; call it once, before any test."""
    name, _, value = TOKEN.partition("=")
    os.environ[name] = value


def _running() -> Iterator[str]:
    return filter(str.isdigit, os.listdir("/proc"))


def _our_process(pid: str) -> str | None:
    """Describes a process if it is our child, dead or alive, or a living descendant."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) != os.getpid() and not _is_descendant(pid):
            return None
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return f"process {pid}, state {state}: {command.strip() or stat.partition(' ')[2]}"
    return None


def _is_descendant(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return TOKEN.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _segments() -> Iterator[str]:
    for inode, name in SHARED_MAPPING.findall(Path("/proc/self/maps").read_text()):
        if not name.startswith(UNCOUNTED_FILES):
            yield f"mapping {inode} of {name}"
    with contextlib.suppress(OSError):
        yield from (f"/dev/shm/{name}" for name in os.listdir("/dev/shm"))


def _our_segment(segment: str) -> str | None:
    """Describes a segment, unless it is a file in /dev/shm that somebody else is using."""
    if segment.startswith("/dev/shm/") and any(_maps(pid, segment) for pid in _strangers()):
        return None
    return f"shared memory: {segment}"


def _strangers() -> Iterator[str]:
    ours = str(os.getpid())
    return (pid for pid in _running() if pid != ours and not _our_process(pid))


def _maps(pid: str, path: str) -> bool:
    with contextlib.suppress(OSError):
        return path in Path(f"/proc/{pid}/maps").read_text()
    return False


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith(UNCOUNTED_FILES):
                yield f"{number}: {target}"


def _changed_variables(
    before: frozenset[tuple[str, str]], after: frozenset[tuple[str, str]]
) -> list[str]:
    was, now = dict(before - after), dict(after - before)
    return [
        f"environment variable {name}: {was.get(name)!r} became {now.get(name)!r}"
        for name in (was.keys() | now.keys()) - UNCOUNTED_VARIABLES
    ]


def _restore(environment: frozenset[tuple[str, str]]) -> None:
    """Puts the environment back, so that one test's leak is not the next one's surprise."""
    if frozenset(os.environ.items()) != environment:
        current = {name: os.environ.get(name) for name in UNCOUNTED_VARIABLES}
        os.environ.clear()
        os.environ.update(environment)
        os.environ.update({name: value for name, value in current.items() if value is not None})

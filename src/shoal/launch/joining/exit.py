"""The end of a rank that joined with `shoal.init`: no other rank may be left waiting for it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from functools import cache
from types import TracebackType

from shoal.comm.world import find_current
from shoal.errors import MismatchError, PeerError
from shoal.launch.joining.environment import discover


@cache
def watch_exit() -> None:
    """Has an uncaught exception reach all ranks, and a normal end count as leaving."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = find_current()
        if world is not None:
            world.fail(error.with_traceback(trace))
        _leave_record(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_leave_world)


def _leave_world() -> None:
    world = find_current()
    if world is None:
        return
    try:
        world.shutdown()
    except MismatchError as error:  # at this point an exception would not change the exit code
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _leave_record(error: BaseException) -> None:
    """Leaves the launcher a note of the failure, where it asked for one."""
    folder = os.environ.get("SHOAL_ERROR_DIR")
    if folder is None:
        return
    rank = discover().rank
    record = {
        "rank": rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "primary": not isinstance(error, PeerError),
    }
    try:
        with open(os.path.join(folder, f"rank-{rank}.json"), "w") as file:
            json.dump(record, file)
    except OSError as problem:
        print(f"shoal: cannot leave a record of the failure: {problem}", file=sys.stderr)

"""The end of a rank that joined with `shoal.init`: nobody may be left waiting for it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from types import TracebackType

from shoal.comm.world import World
from shoal.errors import PeerError


def report_at_exit(world: World) -> None:
    """Has an uncaught exception reach all ranks, and a normal end count as leaving."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        world.fail(error.with_traceback(trace))
        leave_record(world.rank, error)
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(world.shutdown)


def leave_record(rank: int, error: BaseException) -> None:
    """Leaves the launcher a note of the failure, where it asked for one."""
    folder = os.environ.get("SHOAL_ERROR_DIR")
    if folder is None:
        return
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

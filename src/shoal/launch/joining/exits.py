"""How this rank comes to its end: what it notes of it for the others and for its launcher."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from typing import NamedTuple, NoReturn

from shoal.errors import PeerError
from shoal.launch.joining.environment import own_number
from shoal.system.public_call import call_site


class NotedExit(NamedTuple):
    """A call of ``sys.exit`` in the main thread.

    Attributes:
        text: The call with its line.
        code: The exit code that it leads to.
        trace: The stack as a traceback.
        failure: The failure of another rank that it was the answer to, if it was.
    """

    text: str
    code: int
    trace: str
    failure: PeerError | None


_noted: list[NotedExit] = []


def note_exits() -> None:
    """Has ``sys.exit`` leave a note. Python tells nobody else why it ends."""
    original = sys.exit

    def exit_with_note(status: object = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _noted[:] = [_note(status)]
        original(status)  # type: ignore[arg-type]

    sys.exit = exit_with_note


def noted_exit() -> NotedExit | None:
    """The last call of ``sys.exit``, if there was one; it may have been caught."""
    return _noted[0] if _noted else None


def _note(status: object) -> NotedExit:
    frames = traceback.extract_stack(sys._getframe(2))
    code = 0 if status is None else status if isinstance(status, int) else 1
    shown = "" if status is None else repr(status)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    trace = "".join([*lines, f"SystemExit: {status}\n"])
    handled = sys.exc_info()[1]
    failure = handled if isinstance(handled, PeerError) else None
    return NotedExit(f"sys.exit({shown}) at {call_site()}", code, trace, failure)


def leave_record(error: BaseException) -> None:
    """Tells the launcher what this rank fails of."""
    text = "".join(traceback.format_exception(error))
    failure = error if isinstance(error, PeerError) else None
    _write_record(type(error).__name__, str(error), text, failure)


def leave_record_of_exit(noted: NotedExit) -> None:
    """The same for an exit with a code that says so."""
    _write_record("SystemExit", str(noted.code), noted.trace, noted.failure)


def _write_record(kind: str, message: str, text: str, failure: PeerError | None) -> None:
    """``failure`` is that of another rank, if this one only follows it."""
    folder = os.environ.get("SHOAL_ERROR_DIR")
    if folder is None:
        return
    rank = own_number()
    record = {
        "rank": rank,
        "time": time.time(),
        "type": kind,
        "message": message,
        "traceback": text,
        "primary": failure is None,
        "culprit": None if failure is None else failure.rank,
        "context": "" if failure is None else failure.context.partition("\n")[0],
    }
    try:
        with open(os.path.join(folder, f"rank-{rank}.json"), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # the launcher reads it, whatever the umask
            json.dump(record, file)
    except OSError as problem:
        print(f"shoal: cannot leave a record of the failure: {problem}", file=sys.stderr)

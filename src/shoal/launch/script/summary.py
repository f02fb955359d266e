"""One clear account of a failed run: who failed first, of what, and with which code.

Ranks that shoal woke with a PeerError fail too, so the last exit code or the loudest traceback
says little. Ranks leave a record of their exception in `SHOAL_ERROR_DIR`; it says when it happened
and whether it was the rank's own (`primary`) or the echo of another's.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.system.rank_names import name_ranks

_MARKS = ("Traceback (most recent call last)", "Fatal Python error")
_MAX_LINES = 60
_LAST_WORDS = 10


@dataclass(frozen=True)
class Record:
    """A rank's own account of its exception."""

    time: float
    type: str
    message: str
    traceback: str
    primary: bool


@dataclass(frozen=True)
class Ending:
    """How a rank ended: `code` as in subprocess, `time` as seen by the launcher."""

    rank: int
    code: int
    time: float
    stderr_tail: bytes = b""
    record: Record | None = None

    @property
    def exit_code(self) -> int:
        """The code a shell would show: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def cause(self) -> str:
        """What ended the rank, in a few words."""
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"exit code {self.code}"

    @property
    def since(self) -> float:
        """When it failed: an exception happens some time before the process is gone."""
        return self.record.time if self.record else self.time


def read_record(folder: Path, rank: int) -> Record | None:
    """The record that a rank left, if it left a whole one."""
    try:
        fields = json.loads((folder / f"rank-{rank}.json").read_text())
        return Record(
            time=float(fields["time"]),
            type=str(fields["type"]),
            message=str(fields["message"]),
            traceback=str(fields["traceback"]),
            primary=bool(fields["primary"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that failed first: echoes of another's failure count only if there is no other."""
    failed = [ending for ending in endings if ending.code != 0]
    own = [ending for ending in failed if ending.record is None or ending.record.primary]
    return min(own or failed, key=lambda ending: ending.since, default=None)


def summarize(first: Ending, endings: Sequence[Ending]) -> str:
    """The account of a failed run, `first` in detail and the others in a line each kind."""
    lines = [f"shoal: rank {first.rank} failed first ({first.cause})."]
    if first.code == -signal.SIGKILL:
        lines.append(
            "  Nobody but the system or a person sends SIGKILL: look for 'out of memory' in dmesg."
        )
    lines += ["", *(f"  {line}" for line in _story(first)), ""]
    others = [ending for ending in endings if ending is not first]
    lines += [f"  {line}" for line in _others(others)]
    return "\n".join(lines).rstrip()


def _story(first: Ending) -> list[str]:
    """The traceback from the record, else the last one on stderr, else the last words there."""
    if first.record is not None:
        return _shorten(first.record.traceback.strip().splitlines())
    text = first.stderr_tail.decode(errors="replace")
    start = max(text.rfind(mark) for mark in _MARKS)
    if start >= 0:
        return _shorten(text[start:].strip().splitlines())
    return text.strip().splitlines()[-_LAST_WORDS:] or ["(it wrote nothing to stderr)"]


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    half = _MAX_LINES // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]


def _others(endings: Sequence[Ending]) -> list[str]:
    """The other ranks, those that ended alike on one line."""
    alike: dict[str, list[int]] = {}
    for ending in sorted(endings, key=lambda ending: ending.rank):
        kind = f"{ending.record.type}, " if ending.record else ""
        alike.setdefault(f"{kind}{ending.cause}", []).append(ending.rank)
    return [f"{name_ranks(ranks)}: {cause}" for cause, ranks in alike.items()]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""One clear account of a failed run: who failed first, of what, and with which code.

Ranks that shoal woke with a PeerError fail too, so the last exit code or the loudest traceback
says little. Ranks leave a record of their exception in `SHOAL_ERROR_DIR`; it says when it happened
and whether it was the rank's own (`primary`) or the echo of another's.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.system.rank_names import name_spans
from shoal.system.tracebacks import hide_own_frames, message_of, says

_MARKS = ("Traceback (most recent call last)", "Fatal Python error")
_MAX_LINES = 60
_LAST_WORDS = 10
STOPPED = "stopped (SIGSTOP), and killed for that"
"""The fate of a rank that heard no signal."""


@dataclass(frozen=True)
class Record:
    """A rank's own account of its exception."""

    time: float
    type: str
    message: str
    traceback: str
    primary: bool
    culprit: int | None = None
    """The rank that failed or left, where it was not this one."""
    context: str = ""
    """What this rank was doing then."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended: `code` as in subprocess, `time` as seen by the launcher.

    `fate` says why the launcher ended it, if it did; `held` is the traceback at its end, if that
    was kept from the screen.
    """

    rank: int
    code: int
    time: float
    stderr_tail: bytes = b""
    record: Record | None = None
    fate: str = ""
    held: str = ""

    @property
    def exit_code(self) -> int:
        """The code a shell would show: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def cause(self) -> str:
        """What ended the rank, in a few words."""
        if self.fate:
            return self.fate
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"exit code {self.code}"

    @property
    def reason(self) -> str:
        """The same, or the exception that it was."""
        if self.record is None:
            return self.cause
        return f"{self.record.type}: {self.record.message}".partition("\n")[0].removesuffix(": ")

    @property
    def is_own(self) -> bool:
        """Whether it failed by itself: others end because one did, or are ended for that.

        A stopped rank is what the others failed of.
        """
        if self.record is not None:
            return self.record.primary
        return self.fate in ("", STOPPED)

    @property
    def since(self) -> float:
        """When it failed: an exception happens some time before the process is gone."""
        return self.record.time if self.record else self.time


def record_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its record."""
    return folder / f"rank-{rank}.json"


def read_record(folder: Path, rank: int) -> Record | None:
    """The record that a rank left, if it left a whole one."""
    try:
        fields = json.loads(record_path(folder, rank).read_text())
        return Record(
            time=float(fields["time"]),
            type=str(fields["type"]),
            message=str(fields["message"]),
            traceback=str(fields["traceback"]),
            primary=bool(fields["primary"]),
            culprit=fields.get("culprit"),
            context=str(fields.get("context", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that failed first: echoes of another's failure count only if there is no other.

    A rank that left with exit code 0 while others waited for it comes before their echoes.
    """
    failed = sorted((each for each in endings if each.code != 0), key=lambda each: each.since)
    own = [ending for ending in failed if ending.is_own]
    if own or not failed:
        return own[0] if own else None
    culprit = failed[0].record.culprit if failed[0].record else None
    left = [ending for ending in endings if ending.rank == culprit and ending.code == 0]
    return left[0] if left else failed[0]


def exit_code(first: Ending, endings: Sequence[Ending]) -> int:
    """That of the whole launch: never 0, also if the first to leave had that."""
    failed = sorted((each for each in endings if each.code != 0), key=lambda each: each.since)
    return first.exit_code or failed[0].exit_code


def summarize(first: Ending, endings: Sequence[Ending]) -> str:
    """The account of a failed run: `first` in detail, the others as far as they say more."""
    if first.code == 0:
        return _summarize_leaving(first, endings)
    lines = [f"shoal: rank {first.rank} failed first ({first.cause})."]
    if first.code == -signal.SIGKILL and not first.fate:
        lines.append(
            "  Nobody but the system or a person sends SIGKILL: look for 'out of memory' in dmesg."
        )
    story = _story(first)
    lines += ["", *story_of(first), ""]
    for others in _alike([ending for ending in endings if ending is not first]):
        lines += _indented(_account(others, story))
    return "\n".join(lines).rstrip()


def story_of(ending: Ending) -> list[str]:
    """How it came to the end, as lines to be shown: a traceback, or last words."""
    return _indented(_shorten(hide_own_frames(_story(ending)).splitlines()))


def _summarize_leaving(first: Ending, endings: Sequence[Ending]) -> str:
    """The account of a run in which one rank went in good order, and others waited for it."""
    lines = [
        f"shoal: rank {first.rank} left first, with exit code 0, while others waited for it: it "
        "came to the end of its script, or to sys.exit() or os._exit(), earlier than they did."
    ]
    waits: dict[str, list[int]] = {}
    for ending in endings:
        if ending.record is not None and ending.record.culprit == first.rank:
            waits.setdefault(says(ending.record.context), []).append(ending.rank)
    for context, ranks in waits.items():
        lines.append(f"  {name_spans(ranks)} waited in {context}" if context else "")
    lines.append("")
    for others in _alike([ending for ending in endings if ending is not first]):
        lines += _indented(_account(others, ""))
    return "\n".join(lines).rstrip()


def is_interrupt(text: str) -> bool:
    """Whether a traceback only says that someone stopped the run."""
    return message_of(text).startswith(("KeyboardInterrupt", "shoal.errors.PeerError"))


def _story(ending: Ending) -> str:
    """The traceback from the record, else the last one on stderr, else the last words there."""
    if ending.record is not None:
        return ending.record.traceback.strip()
    if ending.held:
        return ending.held.strip()
    text = ending.stderr_tail.decode(errors="replace")
    start = max(text.rfind(mark) for mark in _MARKS)
    if start >= 0:
        return text[start:].strip()
    words = text.strip().splitlines()[-_LAST_WORDS:]
    return "\n".join(words) or "(it wrote nothing to stderr)"


def _alike(endings: Sequence[Ending]) -> list[list[Ending]]:
    """Those that ended alike and say the same, together."""
    groups: dict[tuple[str, str], list[Ending]] = {}
    for ending in sorted(endings, key=lambda ending: ending.rank):
        groups.setdefault((_kind(ending), says(_details(ending))), []).append(ending)
    return list(groups.values())


def _kind(ending: Ending) -> str:
    kind = f"{ending.record.type}, " if ending.record else ""
    return f"{kind}{ending.cause}"


def _account(endings: list[Ending], story: str) -> list[str]:
    """One line, and what was held back from the screen, once."""
    one = endings[0]
    line = f"{name_spans([ending.rank for ending in endings])}: {_kind(one)}"
    if not one.held:
        return [line]
    if says(_story(one)) == says(story):
        return [f"{line}, with the same traceback"]
    return [line, *_indented(_shorten(_details(one).splitlines()))]


def _details(ending: Ending) -> str:
    """What was held back from the screen. Of an echo, who failed and where that was heard."""
    if is_interrupt(ending.held):
        return "\n".join(message_of(ending.held).splitlines()[:2])
    return hide_own_frames(ending.held).strip()


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    half = _MAX_LINES // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

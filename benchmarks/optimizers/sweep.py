"""Tries every optimizer of torch, timm and pytorch_optimizer under shoal: ``make sweep``.

Each is tried in a process of its own, which may take its time but not hang or take others
along. What is done is not done again, until ``--fresh``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what is compiled takes minutes and computes the same
os.environ["OMP_NUM_THREADS"] = "1"  # threads of ranks and of the reference round alike

from catalog import find_classes
from examination import Outcome, Subject, examine
from recipes import UNUSABLE
from summary import Summary, counted, markdown, put_into

RESULTS = Path(__file__).parent.parent / "results" / "optimizers.json"
_FORK = multiprocessing.get_context("fork")  # imports take longer than most optimizers


@dataclass
class Attempt:
    """An optimizer that is being examined by a process."""

    name: str
    process: BaseProcess
    inbox: Connection
    deadline: float
    records: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, subject: Subject, limit_s: float, *, is_quick: bool) -> Attempt:
        """In a process of its own."""
        inbox, outbox = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_examine, args=(subject, outbox, is_quick), daemon=True)
        process.start()
        outbox.close()
        return cls(subject.name, process, inbox, time.monotonic() + limit_s)

    def read(self) -> bool:
        """Takes what has come in; returns whether there may be more."""
        try:
            while self.inbox.poll():
                self.records.append(self.inbox.recv())
        except EOFError:
            return False
        return time.monotonic() < self.deadline

    def end(self) -> list[dict[str, Any]]:
        """All that was found out, and what stopped it."""
        is_late = time.monotonic() >= self.deadline
        if is_late:
            self.process.kill()
            self.records.append({"outcome": Outcome.SLOW, "detail": "not done in time"})
        self.process.join()
        if self.process.exitcode and not is_late:
            detail = f"its process ended with {self.process.exitcode}"
            self.records.append({"outcome": Outcome.FAILED, "detail": detail})
        self.inbox.close()
        return self.records


def _examine(subject: Subject, outbox: Connection, is_quick: bool) -> None:
    for record in examine(subject, is_quick=is_quick):
        outbox.send(record)


def sweep(subjects: Sequence[Subject], options: argparse.Namespace) -> None:
    """Examines what the file of results does not know yet, and adds to it."""
    path: Path = options.json
    known = json.loads(path.read_text()) if path.exists() else {}
    waiting = [subject for subject in subjects if subject.name not in known]
    running: list[Attempt] = []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            subject = waiting.pop(0)
            running.append(Attempt.start(subject, options.limit, is_quick=options.quick))
        wait([attempt.inbox for attempt in running], timeout=1.0)
        for attempt in [each for each in running if not each.read()]:
            running.remove(attempt)
            known[attempt.name] = attempt.end()
            path.write_text(json.dumps(known, indent=1))
            print(Summary.of(attempt.name, known[attempt.name]), flush=True)


def main() -> int:
    options = _parse()
    subjects = [
        Subject(name, cls)
        for name, cls in find_classes().items()
        if not options.only or any(part in name for part in options.only)
    ]
    if options.fresh:
        options.json.unlink(missing_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    usable = [subject for subject in subjects if subject.name not in UNUSABLE]
    if not options.table_only:
        sweep(usable, options)
    now = _summaries(subjects, options.json)
    before = _summaries(subjects, options.before) if options.before else None
    table = f"{counted(now)}.\n\n{markdown(now, before)}"
    options.json.with_suffix(".md").write_text(table)
    if options.page:
        put_into(options.page, table)
    print(counted(now))
    return int(any(each.is_wrong for each in now))


def _summaries(subjects: Sequence[Subject], path: Path) -> list[Summary]:
    results = json.loads(path.read_text()) if path.exists() else {}
    return [_summary(subject.name, results.get(subject.name)) for subject in subjects]


def _summary(name: str, records: list[dict[str, Any]] | None) -> Summary:
    if name in UNUSABLE:
        return Summary.without_comparison(name, Outcome.UNUSABLE, UNUSABLE[name])
    if not records:
        return Summary.without_comparison(name, Outcome.UNTRIED)
    return Summary.of(name, records)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", help="parts of names, for example timm. or AdamP")
    parser.add_argument("--json", type=Path, default=RESULTS, help="results; a table goes beside")
    parser.add_argument("--before", type=Path, help="results of another version, for the table")
    parser.add_argument("--page", type=Path, help="a page of the docs to put the table into")
    parser.add_argument("--table-only", action="store_true", help="of the results there are")
    parser.add_argument("--fresh", action="store_true", help="forget the results there are")
    parser.add_argument("--quick", action="store_true", help="a third of the comparisons")
    parser.add_argument("--jobs", type=int, default=2, help="how many optimizers at once")
    parser.add_argument("--limit", type=float, default=90, help="seconds for one optimizer")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

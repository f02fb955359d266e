"""The trial: rank 0 trains the reference beside its part, step by step, and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shoal.comm.world import World, current
from shoal.verification.diagnosis import Case, likely_cause
from shoal.verification.judge import Difference, Judge, default_tolerance
from shoal.verification.member import Member, Wrap
from shoal.verification.report import Report
from shoal.verification.single import SplitBatch, WholeBatch
from shoal.verification.trainee import Build

REFERENCES = ("batch", "split")
_MIXED_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Trial:
    """What is to be compared with what.

    Attributes:
        build: Makes model, optimizer, batches and loss function, on every rank anew.
        wrap: Makes model and optimizers distributed; takes ``strategy`` and ``options``.
        strategy: Its name.
        ranks: How many ranks.
        backend: What they communicate over.
        steps: How many steps to train.
        reference: "batch" or "split".
        tolerance: What an element may be off by; None: by the kind of numbers.
        options: Of the strategy.
    """

    build: Build
    wrap: Wrap
    strategy: str = "ddp"
    ranks: int = 2
    backend: str = "memory"
    steps: int = 5
    reference: str = "batch"
    tolerance: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses what cannot be tried."""
        if self.reference not in REFERENCES:
            raise ValueError(f"reference must be one of {REFERENCES}; got {self.reference!r}")
        if self.steps < 1:
            raise ValueError(f"need at least one step to compare; got {self.steps}")


@dataclass
class Findings:
    """What the ranks bring back.

    Attributes:
        tolerance: The one that was used.
        difference: The first one, or None.
        largest: The largest differences, by kind.
        ranks_differ: Where ranks differ among themselves, in words; empty if they do not.
        largest_move: How far the first step moved any parameter.
    """

    tolerance: float
    difference: Difference | None = None
    largest: dict[str, float] = field(default_factory=dict)
    ranks_differ: str = ""
    largest_move: float = 0.0


def hold(trial: Trial, run: Callable[..., list[Any]]) -> Report:
    """Holds a trial; ``run(fn, ranks, backend, args)`` calls a function on every rank."""
    findings: Findings = run(_attend, trial.ranks, trial.backend, (trial,))[0]
    cause = ""
    if findings.difference is not None:
        cause = likely_cause(
            Case(
                trial.build,
                trial.ranks,
                trial.reference,
                trial.options,
                findings.tolerance,
                findings.difference,
                findings.ranks_differ,
            )
        )
    return Report(
        trial.strategy,
        trial.ranks,
        trial.backend,
        trial.reference,
        trial.steps,
        findings.tolerance,
        findings.difference,
        cause,
        findings.largest,
        tuple(_notes(findings)),
    )


def _notes(findings: Findings) -> list[str]:
    if findings.largest_move >= findings.tolerance:
        return []
    return [
        f"no parameter moved by more than {findings.largest_move:.1e} in the first step, less than "
        "the tolerance: the optimizer was hardly tested (raise its learning rate)"
    ]


def _attend(trial: Trial) -> Findings | None:
    """What one rank does."""
    world = current()
    wrap = partial(trial.wrap, strategy=trial.strategy, **trial.options)
    member = Member(trial.build, trial.steps, world, wrap)
    tolerance = trial.tolerance
    if tolerance is None:
        tolerance = default_tolerance(member.parts.model)
        if trial.options.get("mixed_precision"):
            tolerance = max(tolerance, _MIXED_TOLERANCE)
    findings = Findings(tolerance)
    if world.rank == 0:
        bench = _Bench(_reference(trial), Judge(tolerance), findings)
    else:
        bench = None
    for step in range(trial.steps):
        if not _step(step, member, bench, world, findings):
            break
    return findings if world.rank == 0 else None


def _reference(trial: Trial) -> WholeBatch:
    if trial.reference == "split":
        return SplitBatch(trial.build, trial.steps, trial.ranks)
    return WholeBatch(trial.build, trial.steps)

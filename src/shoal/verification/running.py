"""A trial from beginning to end: held on the ranks, and looked into if they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.verification.attendance import attend
from shoal.verification.diagnosis.causes import likely_cause
from shoal.verification.diagnosis.replay import Case
from shoal.verification.experiment import Findings, Trial
from shoal.verification.report import Report


def hold(trial: Trial, run: Callable[..., list[Any]]) -> Report:
    """Holds a trial; ``run(fn, ranks, backend, args)`` calls a function on every rank."""
    findings: Findings = run(attend, trial.ranks, trial.backend, (trial,))[0]
    difference, cause = findings.difference, ""
    if difference is not None:  # in a world of one: the model may ask for its rank
        cause = run(likely_cause, 1, "memory", (Case(trial, findings, difference),))[0]
    return Report(
        strategy=trial.strategy,
        ranks=trial.ranks,
        backend=trial.backend,
        reference=trial.reference,
        steps=trial.steps,
        tolerance=findings.tolerance,
        difference=difference,
        cause=cause,
        largest=findings.largest,
        notes=_notes(findings),
    )


def _notes(findings: Findings) -> tuple[str, ...]:
    if findings.first_move >= findings.tolerance:
        return ()
    return (
        f"no parameter moved by more than {findings.first_move:.1e} in the first step, which is "
        "less than the tolerance: the optimizer was hardly tested (raise its learning rate)",
    )

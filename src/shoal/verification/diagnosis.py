"""Why training might differ: suspects are tried in one process, the most common one first.

One process on the whole batch and one that replays the ranks' local batches need no
communication. Where already these two differ, the ranks are not to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.partition import split_sizes
from shoal.strategies.training import count_items
from shoal.verification.judge import Difference, Judge
from shoal.verification.single import SplitBatch, WholeBatch
from shoal.verification.trial import Findings, Trial


@dataclass(frozen=True)
class Case:
    """A trial that ended in a difference."""

    trial: Trial
    findings: Findings
    difference: Difference

    @cached_property
    def num_steps(self) -> int:
        """The steps up to and including the one that differed."""
        return self.difference.step

    def whole(self, variation: int = 0) -> WholeBatch:
        """One process on the whole batch."""
        return WholeBatch(self.trial.build, self.num_steps, variation=variation)

    def split(self) -> SplitBatch:
        """One process that replays the ranks."""
        return SplitBatch(self.trial.build, self.num_steps, self.findings.num_shares)

    def compare(self, left: WholeBatch, right: WholeBatch) -> Difference | None:
        """The first difference of two single processes."""
        judge = Judge(self.findings.tolerance)
        for step in range(self.num_steps):
            if not judge.compare(step, left.walk(step), right.walk(step)):
                break
        return judge.first

    @cached_property
    def division(self) -> Difference | None:
        """How one process on the parts of a batch differs from one on the whole."""
        return self.compare(self.whole(), self.split())

    @cached_property
    def model(self) -> nn.Module:
        """The user's."""
        return self.whole().parts.model

    @property
    def has_batch_statistics(self) -> bool:
        """Whether a layer in training looks at all rows of a batch."""
        return any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())


def likely_cause(case: Case) -> str:
    """The first suspect that cannot clear itself."""
    answers = (_question(suspect, case) for suspect in _SUSPECTS)
    return next((answer for answer in answers if answer), _the_ranks(case))


def _question(suspect: Callable[[Case], str], case: Case) -> str:
    """A guess that cannot be made must not hide what is known for sure."""
    try:
        return suspect(case)
    except Exception:
        return ""


def _repetition(case: Case) -> str:
    if case.compare(case.whole(), case.whole()) is None:
        return ""
    return (
        "training is not deterministic: two runs in one process differ already. Look for random "
        "numbers from generators of your own, the time, or the order of a set in build(), the "
        "model or the loss; everything drawn from torch, numpy and random is seeded alike"
    )


def _divergence(case: Case) -> str:
    whole = case.whole()
    losses = [
        float(seen.value)
        for step in range(case.num_steps)
        for seen in whole.walk(step)
        if seen.kind == "loss" and seen.value is not None
    ]
    if all(map(math.isfinite, losses)):
        return ""
    return (
        "the loss is not finite in one process either, and what is not a number cannot be "
        "compared: lower the learning rate, or the number of steps"
    )


def _random_numbers(case: Case) -> str:
    if case.trial.reference == "split":
        return ""
    if case.compare(case.whole(), case.whole(variation=1)) is None:
        return ""
    return (
        "the model draws random numbers while it trains (dropout?), and ranks draw others for "
        'their rows than one process does for the whole batch: compare with reference="split", '
        "which draws as the ranks do, or switch the dropout off"
    )


def _batch_statistics(case: Case) -> str:
    is_synchronized = bool(case.trial.options.get("sync_batchnorm"))
    if not case.has_batch_statistics:
        return ""
    if case.trial.reference == "split" and is_synchronized:
        return (
            "with sync_batchnorm=True the ranks train as one process on the whole batch: compare "
            'with reference="batch"'
        )
    if case.trial.reference == "split" or is_synchronized or case.division is None:
        return ""
    return (
        "BatchNorm takes the statistics of a rank's own rows where one process takes those of the "
        'whole batch: train with sync_batchnorm=True, or compare with reference="split"'
    )


def _rounding(case: Case) -> str:
    if case.trial.reference == "split" or case.division is None:
        return ""
    # Where the gradients agree and what the same optimizer makes of them does not, it is its doing.
    if case.division.kind != "parameter" and not _is_same_in_double(case):
        return ""
    names = ", ".join(type(one).__name__ for one in case.whole().parts.optimizers)
    return (
        "rounding, amplified: one process on the parts of a batch and one on the whole also "
        f"differ, but only in what {names} makes of equal gradients, or not in float64. Adam "
        "with a small eps, for example, makes full steps of a gradient that is zero but for "
        'rounding: compare in float64, with a larger eps, or with reference="split"'
    )


def _is_same_in_double(case: Case) -> bool:
    whole, split = case.whole(), case.split()
    whole.to_double()
    split.to_double()
    return case.compare(whole, split) is None


def _rows(case: Case) -> str:
    """Not a mean over rows."""
    is_synchronized = bool(case.trial.options.get("sync_batchnorm"))
    if case.trial.reference == "split" or case.division is None or is_synchronized:
        return ""
    return (
        "one process gives different results for the whole batch and for its parts, so the ranks "
        "are not to blame: the loss must be the mean over the rows of a batch (not a sum, not a "
        "mean over tokens whose number varies), and a row's output must not depend on other rows"
        f'{_uneven(case)}. reference="split" compares with one process on the parts'
    )


def _uneven(case: Case) -> str:
    rows = count_items(case.whole().parts.batches[case.num_steps - 1][0])
    if rows % case.findings.num_shares == 0:
        return ""
    sizes = split_sizes(rows, case.findings.num_shares)
    return f" (the parts have {', '.join(map(str, sizes))} rows)"


def _own_ways(case: Case) -> str:
    if not case.findings.ranks_differ:
        return ""
    return (
        f"{case.findings.ranks_differ}: they did not make the same step. Something outside of the "
        "averaged gradients changes the parameters on single ranks (code that asks for the rank, "
        "state of the optimizer from elsewhere), or gradients were not averaged"
    )


def _narrow_miss(case: Case) -> str:
    is_late = case.difference.step > 1  # rounding needs time
    if not (is_late and case.difference.absolute <= 10 * case.findings.tolerance):
        return ""
    return (
        f"perhaps only rounding that adds up: the difference is less than ten times the tolerance "
        f"of {case.findings.tolerance:g}. Try float64, or a larger tolerance"
    )


def _the_ranks(case: Case) -> str:
    return (
        "one process that replays the ranks' parts gives the right result, so the difference comes "
        "from the ranks: does the model, the loss or build() depend on the rank, on the number of "
        "ranks, or on how often it was called? If not, this is a bug in shoal"
    )


_SUSPECTS: tuple[Callable[[Case], str], ...] = (
    _divergence,  # before all that compares: what is not a number equals nothing
    _repetition,
    _random_numbers,
    _batch_statistics,
    _rounding,
    _rows,
    _own_ways,
    _narrow_miss,
)

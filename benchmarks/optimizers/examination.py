"""One optimizer, tried under every strategy and compared with one process in its place."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from cases import STEPS, TOLERANCE, Division, Training, divisions, trainings
from recipes import build_optimizer, known_options
from replay import Nudge, Replay, moved
from torch import nn
from torch.optim import Optimizer

import shoal
import shoal.optim.proof.judging
from shoal.verification import Difference

# The first with which one process stays within bounds: what diverges makes much of rounding.
_RATES = (1e-2, 1e-3, 1e-4, 1e-5)
_SLOW_STEP_S = 2.0
_NARROW_MISS = 10
_NUM_NUDGES = 8
_Build = Callable[[], Any]


class Outcome(StrEnum):
    """Of one comparison; the later ones are the worse ones."""

    EQUAL = "equal"
    UNTRIED = "not tried"
    REFUSED = "refused"
    """By shoal, with a reason."""
    SLOW = "too slow"
    """A step in one process takes so long that nothing was compared."""
    UNUSABLE = "cannot be used alone"
    """Already one process cannot train with it."""
    ROUNDING = "rounding"
    """Off by less than ten tolerances, and so is one process that rounds differently."""
    UNSTABLE = "unstable"
    """Off by more, and so is one process that rounds differently."""
    FAILED = "FAILED"
    """With an error that is not shoal's own."""
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True)
class Subject:
    """An optimizer class and its name in the catalog."""

    name: str
    cls: type[Optimizer]

    def make(self, model: nn.Module, options: Mapping[str, Any], lr: float) -> list[Optimizer]:
        """A new one for a model."""
        return build_optimizer(self.name, self.cls, model, {"lr": lr, **options})


def examine(subject: Subject, *, is_quick: bool) -> Iterator[dict[str, Any]]:
    """Yields a record for each comparison: of what, and what came out."""
    warnings.simplefilter("ignore")
    for training in trainings(known_options(subject.cls), is_quick=is_quick):
        about = {"training": str(training)}
        try:
            build, lr, step_s = _try_alone(subject, training)
        except Exception as error:
            yield about | {"outcome": Outcome.UNUSABLE, "detail": _in_a_line(error)}
            continue
        about |= {"lr": lr, "plain_step_s": step_s}
        if step_s > _SLOW_STEP_S:
            yield about | {"outcome": Outcome.SLOW, "detail": f"a plain step takes {step_s:.2g} s"}
            continue
        about |= _judgement(build()[1][0])
        for division in divisions(training):
            began = time.perf_counter()
            found = _compare(build, division)
            spent = {"division": str(division), "seconds": time.perf_counter() - began}
            yield about | spent | found


def _try_alone(subject: Subject, training: Training) -> tuple[_Build, float, float]:
    """The training at a rate that one process can train with, and the time of its steps."""
    for lr in _RATES:
        build = partial(training.build, partial(subject.make, lr=lr))
        began = time.perf_counter()
        is_stable = Replay(build, STEPS, num_ranks=2).is_stable()
        step_s = (time.perf_counter() - began) / STEPS
        if is_stable or step_s > _SLOW_STEP_S:
            break
    return build, lr, step_s


def _judgement(optimizer: Optimizer) -> dict[str, str]:
    """The kind that shoal finds and, where this version gives one, the reason."""
    judge = getattr(shoal.optim.proof.judging, "judge", None)
    if judge is None:
        return {"kind": shoal.optim.find_kind(optimizer).value, "reason": ""}
    judgement = judge(optimizer)
    return {"kind": judgement.kind.value, "reason": judgement.reason}


def _compare(build: _Build, division: Division) -> dict[str, Any]:
    try:
        report = shoal.verify(
            build,
            strategy=division.strategy,
            ranks=division.ranks,
            backend="memory",
            steps=STEPS,
            reference="split",
            tolerance=TOLERANCE,
        )
    except Exception as error:
        return {"outcome": _blame(error), "detail": _in_a_line(error)}
    found: dict[str, Any] = {"largest": report.largest["parameter"]}
    if report.difference is None:
        return found | {"outcome": Outcome.EQUAL, "detail": ""}
    return found | _look_into(build, division, report.difference)


def _look_into(build: _Build, division: Division, first: Difference) -> dict[str, Any]:
    """Is it rounding? Then one process is off as well, when it rounds differently."""
    text = f"{first.kind} {first.name}, step {first.step}: off by {first.absolute:.1e}"
    if first.kind == "ranks":  # all of them computed the same, and must have the same
        return {"outcome": Outcome.DIFFERENT, "detail": text}
    usual = _effect_of_rounding(build, division, first.step, first.kind)
    text += f" ({first.relative:.1e} of the largest value); rounding in one process: {usual:.1e}"
    if usual < first.absolute / 3:
        return {"outcome": Outcome.DIFFERENT, "detail": text}
    allowed = TOLERANCE * (1 + first.absolute / max(first.relative, 1e-300))
    is_near = first.absolute <= _NARROW_MISS * allowed
    return {"outcome": Outcome.ROUNDING if is_near else Outcome.UNSTABLE, "detail": text}


def _effect_of_rounding(build: _Build, division: Division, steps: int, kind: str) -> float:
    """How far one process gets from itself. Sixteen-bit numbers inside a step notice seldom."""
    effects = []
    for change in (moved, *map(Nudge, range(_NUM_NUDGES))):
        plain = Replay(build, steps, division.ranks)
        try:
            effects.append(plain.distance_to(Replay(build, steps, division.ranks, change), kind))
        except Exception:  # a decomposition that no longer converges, for example
            effects.append(math.inf)
    return max(effects)


def _blame(error: Exception) -> Outcome:
    """Whether it was shoal that refused, or something broke."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and "/shoal/" in frames[-1].filename
    return Outcome.REFUSED if is_ours else Outcome.FAILED


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

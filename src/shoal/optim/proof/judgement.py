"""What was found in an optimizer's steps and where, and what was decided about the optimizer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

import torch

from shoal.optim.kinds import Kind

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_OPTIMIZERS = os.path.join(_TORCH, "optim") + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NO_FILES = ("<string>", contextlib.__file__)


@dataclass(frozen=True)
class StepFinding:
    """Something in a step that a division would change."""

    finest: Kind  # what the optimizer can be at best, having done this
    what: str  # the operation and what is wrong with it, in words
    where: str  # the line of the optimizer that asked for it

    def __str__(self) -> str:
        return f"{self.what}, at {self.where}" if self.where else self.what


@dataclass(frozen=True)
class Judgement:
    """What an optimizer needs to see at once, and how that is known."""

    kind: Kind  # the decision
    reason: str  # why, in a few words
    # Whether each step is checked against the decision, because it was proved for tiny
    # parameters and a few steps only.
    is_watched: bool = False
    draws: bool = False  # whether its steps were seen to draw random numbers
    # Whether they might: larger parameters may take another branch than tiny ones.
    may_draw: bool = False
    # Names of hyperparameters that its steps change by themselves.
    written_options: frozenset[str] = frozenset()
    # For each name in its state whether that has data of the parameter.
    marked_state: Mapping[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def current_line() -> str:
    """File and line of the innermost frame that is neither torch's nor of `shoal.optim`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_of_torch = name.startswith(_TORCH) and not name.startswith(_TORCH_OPTIMIZERS)
        if not is_of_torch and not name.startswith(_HERE) and name not in _NO_FILES:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

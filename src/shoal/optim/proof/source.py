"""The line of the user's optimizer that asked for an operation."""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_OPTIMIZERS = os.path.join(_TORCH, "optim") + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NO_FILES = ("<string>", contextlib.__file__)


def current_line() -> str:
    """File and line of the innermost frame that is neither torch's nor of `shoal.optim`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_torch_s = name.startswith(_TORCH) and not name.startswith(_TORCH_OPTIMIZERS)
        if not is_torch_s and not name.startswith(_HERE) and name not in _NO_FILES:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

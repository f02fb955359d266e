"""Transforms of `torch.func` and forward-mode differentiation, around a call of the model."""

from __future__ import annotations

from shoal.comm import Backend
from shoal.errors import ShoalError
from shoal.torch_internals.autograd import is_forward_mode, transforms


def check_forward_mode(backend: Backend) -> None:
    """Refuses forward mode where parameters are gathered: it would fail in torch, without advice.

    Inside of `torch.func.jvp` nothing can be copied into parameters. The level of
    `torch.autograd.forward_ad` is one for all threads of a process, and so for all ranks of it.
    """
    is_jvp = "Jvp" in transforms()
    is_dual = is_forward_mode() and backend.name == "memory"
    if is_jvp or is_dual:
        what = "torch.func.jvp" if is_jvp else "torch.autograd.forward_ad over 'memory'"
        raise ShoalError(
            f"forward-mode differentiation ({what}) does not go with parameters that are gathered "
            "while they are used: choose strategy 'ddp', 'zero1' or 'zero2', or 'zero3' over "
            "shared memory, where nothing is gathered"
        )


def is_transforming() -> bool:
    """Whether forward is inside of `torch.func.grad` or the like, which leaves no gradients."""
    return any(each != "Vmap" for each in transforms())

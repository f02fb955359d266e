"""Memory of parameters that somebody still holds on to after it was let go of.

[Note: lent memory]
``q.data.copy_(p.data)`` asks for q's memory first and then for p's, and if that is in another
group, q's has been let go of when it is written to. So a whole that is in somebody's hands when it
is freed outside of forward and backward is *lent*: what is written to it until the next step of an
optimizer counts. After that it is old, and writing to it is an error: the values that it had are
not the parameters' any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.strategies.flat_group import FlatGroup


class Lent:
    """One whole of a group, and what was in it when it was freed."""

    def __init__(self, group: FlatGroup) -> None:
        """The group has it still, and its parameters do not."""
        self._group, self._whole = group, group.whole
        self._before = group.whole.clone()
        self.is_old = False

    @property
    def is_held(self) -> bool:
        """Whether somebody can still write to it."""
        return is_held(self._whole)

    def adopt(self) -> bool:
        """Makes what was written to it count, and returns whether anything was."""
        now, before = self._whole, self._before
        is_new = (now != before) & ~(now.isnan() & before.isnan())
        if not is_new.any():
            return False
        self._before = now.clone()  # one error is enough
        if self.is_old:
            names = self._group.names
            raise ShoalError(
                f"memory of {names[0]} to {names[-1]} that was taken (with .data or .detach()) "
                "before the optimizer's last step was written to after it: parameters are spread "
                "over the ranks, so ask for .data anew after each step"
            )
        self._group.overwrite(is_new, now)
        return True


def is_held(whole: Tensor) -> bool:
    """Whether there is any other tensor in its memory."""
    # One is the tensor itself, one the object that stands for its memory in Python.
    return num_uses(whole) > 2


def num_uses(tensor: Tensor) -> int:
    """How many tensors and other objects there are in its memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count

"""Memory that parameters had, and that users still reference.

[Note: freed memory that users reference]
``q.data.copy_(p.data)`` asks for q's memory first and then for p's, and if p is in another group,
gathering it has freed q's whole by the time it is written to. So if users reference a whole when
it is freed, and took it outside of forward and backward, what is written to it until the next step
of an optimizer counts. After that step it is old, and writing to it is an error: its values are not
the parameters' any more. Where ranks share memory, the old memory would still show the parameters.
Code must behave alike with and without shared memory, so at a step the parameters get another view
there, and writing to the old one is the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.errors import ShoalError
from shoal.torch_internals.tensors import num_storage_users
from shoal.torch_support.private_view import PrivateView

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup


class FreedWhole:
    """One whole of a group, and what was in it when it was freed."""

    def __init__(self, group: FlatGroup) -> None:
        """The group still has it, and its parameters do not."""
        self._group, self._whole = group, group.whole
        self._before = group.whole.clone()
        self.is_old = False

    @property
    def is_referenced(self) -> bool:
        """Whether users can still write to it."""
        return num_references(self._whole) > 1

    def adopt(self) -> bool:
        """Makes what was written to it count, and returns whether anything was."""
        now, before = self._whole, self._before
        is_new = (now != before) & ~(now.isnan() & before.isnan())
        if not is_new.any():
            return False
        self._before = now.clone()  # one error is enough
        if self.is_old:
            raise _written_late(self._group.names)
        self._group.changes.overwrite(is_new, now)
        return True


class ReplacedView:
    """A private view of common parameters that was in use up to a step, and is still referenced.

    It shows what all ranks write until it is written to itself; see [Note: private views].
    """

    def __init__(self, names: Sequence[str], view: PrivateView) -> None:
        """The parameters named so have another view now."""
        self._names, self._view = names, view
        self.is_old = True

    @property
    def is_referenced(self) -> bool:
        """Whether users can still write to it."""
        return num_references(self._view.memory) > 1

    def adopt(self) -> bool:
        """Raises if it was written to."""
        if self._view.written():
            self._view.drop()  # one error is enough
            raise _written_late(self._names)
        return False


def num_references(memory: Tensor) -> int:
    """How many tensors there are in the same memory."""
    # One more counts for the object that stands for the memory in Python.
    count: int = num_storage_users(memory)
    return count - 1


def _written_late(names: Sequence[str]) -> ShoalError:
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return ShoalError(
        f"memory of {which} that was taken (with .data or .detach()) before the optimizer's last "
        "step was written to after it: parameters are spread over the ranks, so ask for .data anew "
        "after each step"
    )

"""`Kind`: what an optimizer needs to see at once: elements, whole parameters, or everything.

[Note: adding a kind]
A kind is a member here, in order from fine to coarse (and perhaps not `is_divisible`), and a
`WorkDivision` with its entry of `DIVISIONS` in `shoal.optim.division.segmented`, which says how the
work of such an optimizer is divided. Split layers refuse it until `shoal.optim.tensor_optimizer`
has a division for it, too. Which kind an optimizer has is found out by `shoal.optim.proof`, or
declared by the user.
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """How finely an optimizer's work may be divided.

    Example:
        >>> Kind("element-wise").is_finer_than(Kind.GLOBAL)
        True
    """

    ELEMENT_WISE = "element-wise"
    """Each element is stepped by itself."""
    PER_PARAMETER = "per-parameter"
    """Each parameter is stepped by itself, and all of it is looked at."""
    GLOBAL = "global"
    """A step may couple any parameters."""

    def is_finer_than(self, other: Kind) -> bool:
        """Whether an optimizer of this kind may be divided further than one of the other."""
        order = list(Kind)
        return order.index(self) < order.index(other)

    @property
    def is_divisible(self) -> bool:
        """Whether ranks can step different parts."""
        return self is not Kind.GLOBAL

"""How an optimizer's work is divided over the ranks, by the optimizer's kind.

`work_division` says what a division does, and has the one that divides nothing; `segmented` has the
others, and `segmentation` cuts memory into what a rank steps. `DIVISIONS` is the table by kind.
"""

from collections.abc import Mapping

from shoal.optim.division.segmented import ByElement, ByParameter
from shoal.optim.division.work_division import Undivided
from shoal.optim.division.work_division import WorkDivision as WorkDivision
from shoal.optim.kinds import Kind

DIVISIONS: Mapping[Kind, type[WorkDivision]] = {
    Kind.ELEMENT_WISE: ByElement,
    Kind.PER_PARAMETER: ByParameter,
    Kind.GLOBAL: Undivided,
}
"""How the work of an optimizer of each kind is divided."""

"""How an optimizer's work is divided over the ranks, by the optimizer's kind.

`work_division` says what a division does, `undivided` and `segmented` are the divisions there are,
and `DIVISIONS` tells which kind is divided how. `segmentation` cuts memory into what a rank steps.
"""

from collections.abc import Mapping

from shoal.optim.division.segmented import ByElement, ByParameter
from shoal.optim.division.undivided import Undivided
from shoal.optim.division.work_division import WorkDivision as WorkDivision
from shoal.optim.kinds import Kind

DIVISIONS: Mapping[Kind, type[WorkDivision]] = {
    Kind.ELEMENT_WISE: ByElement,
    Kind.PER_PARAMETER: ByParameter,
    Kind.GLOBAL: Undivided,
}
"""How the work of an optimizer of each kind is divided."""

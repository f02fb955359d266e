"""How an optimizer's work is divided over the ranks, by the optimizer's kind.

`work_division` says what a division does, and has the one that divides nothing; `segmented` has the
others and `DIVISIONS`, the table by kind; `segmentation` cuts memory into what a rank steps.
"""

from shoal.optim.division.segmented import DIVISIONS as DIVISIONS
from shoal.optim.division.work_division import WorkDivision as WorkDivision

"""Does distributed training give what one process gives? Trains both, and compares."""

from shoal.verification.comparison import Difference
from shoal.verification.experiment import Trial
from shoal.verification.report import Report
from shoal.verification.running import hold

__all__ = ["Difference", "Report", "Trial", "hold"]

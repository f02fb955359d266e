"""Does distributed training give what one process gives? Trains both, and compares."""

from shoal.verification.judge import Difference
from shoal.verification.report import Report
from shoal.verification.trial import Trial
from shoal.verification.verdict import hold

__all__ = ["Difference", "Report", "Trial", "hold"]

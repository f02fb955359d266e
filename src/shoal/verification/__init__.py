"""Does distributed training give what one process gives? Trains both, and compares."""

from shoal.verification.comparison import Difference
from shoal.verification.experiment import Experiment, Report
from shoal.verification.running import verify_experiment

__all__ = ["Difference", "Experiment", "Report", "verify_experiment"]

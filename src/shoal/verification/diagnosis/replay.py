"""An experiment that ended in a difference, replayed in one process to find the cause."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.strategies.training import count_items
from shoal.torch_internals.modules import BatchNorm
from shoal.verification.comparison import Comparison, Difference
from shoal.verification.diagnosis.loss_weights import PartLosses
from shoal.verification.experiment import Experiment, Findings
from shoal.verification.trainers.one_process import SplitBatch, WholeBatch
from shoal.verification.trainers.trainer import Setup


@dataclass(frozen=True)
class Replay:
    """An experiment that ended in a difference."""

    experiment: Experiment
    findings: Findings
    difference: Difference

    @cached_property
    def num_steps(self) -> int:
        """The steps up to and including the one that differed."""
        return self.difference.step

    def whole(self, variation: int = 0) -> WholeBatch:
        """One process on the whole batch."""
        return WholeBatch(self.experiment.build, self.num_steps, variation=variation)

    def split(self) -> SplitBatch:
        """One process that replays the ranks, and the micro-batches of each."""
        return SplitBatch(
            self.experiment.build, self.num_steps, self.num_parts, weight=self.experiment.weight
        )

    @cached_property
    def num_parts(self) -> int:
        """What a batch is cut into, over all ranks."""
        rows = count_items(self.setup.batches[self.num_steps - 1][0])
        most = self.findings.num_shares * self.findings.num_micro_batches
        return min(most, rows) if self.has_micro_batches else most

    @property
    def has_micro_batches(self) -> bool:
        """Whether a rank's rows are cut once more, in a pipeline."""
        return self.findings.num_micro_batches > 1

    @property
    def is_replayed(self) -> bool:
        """Whether the reference cuts batches as the ranks do."""
        return self.experiment.reference == "split" and not self.has_micro_batches

    def compare(self, left: WholeBatch, right: WholeBatch) -> Difference | None:
        """The first difference of two single processes."""
        comparison = Comparison(self.findings.tolerance)
        for step in range(self.num_steps):
            if not comparison.compare(step, left.observe(step), right.observe(step)):
                break
        return comparison.first

    @cached_property
    def division(self) -> Difference | None:
        """How one process on the parts of a batch differs from one on the whole."""
        return self.compare(self.whole(), self.split())

    @cached_property
    def setup(self) -> Setup:
        """What the user has built, as it is before training."""
        return self.whole().setup

    @property
    def has_batch_statistics(self) -> bool:
        """Whether a layer in training looks at all rows of a batch."""
        modules = self.setup.model.modules()
        return any(isinstance(m, BatchNorm) and m.training for m in modules)

    @cached_property
    def losses(self) -> PartLosses:
        """Of the batch in which training differed, whole and in parts."""
        setup = self.whole().setup
        return PartLosses(setup, setup.batches[self.num_steps - 1], self.num_parts)

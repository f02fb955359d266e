"""Tensor parallelism: column, row, vocabulary and attention-head splits by a plan."""

from shoal.strategies.tensor.layers.cross_entropy import vocabulary_cross_entropy
from shoal.strategies.tensor.model import TensorParallelModel
from shoal.strategies.tensor.parallelize import parallelize
from shoal.strategies.tensor.parts import TensorParts
from shoal.strategies.tensor.plan.drafting import draft
from shoal.strategies.tensor.plan.plan import Plan, Style

__all__ = [
    "Plan",
    "Style",
    "TensorParallelModel",
    "TensorParts",
    "draft",
    "parallelize",
    "vocabulary_cross_entropy",
]

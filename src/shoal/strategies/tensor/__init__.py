"""Tensor parallelism: column, row, vocabulary and attention-head splits by a plan."""

from shoal.strategies.tensor.layers.cross_entropy import vocabulary_cross_entropy
from shoal.strategies.tensor.model import TensorParallelModel
from shoal.strategies.tensor.parallelize import parallelize
from shoal.strategies.tensor.plan.draft import draft
from shoal.strategies.tensor.plan.tensor_plan import Plan, Style
from shoal.strategies.tensor.tensor_parts import TensorParts

__all__ = [
    "Plan",
    "Style",
    "TensorParallelModel",
    "TensorParts",
    "draft",
    "parallelize",
    "vocabulary_cross_entropy",
]

"""Tensor parallelism: column, row, vocabulary and attention-head splits by a plan.

To read, in this order:

1. `tensor_parallel`: `TensorParallelModel`, what users see.
2. `parallelize`: a module is changed in place, by a plan; how a forward begins.
3. `plan`: what is split (`TensorPlan`), found (`draft`) or described by the user.
4. `trial`: whether a split gives what one process gives, found by trying.
5. `region`: what split layers share; `layers`: the split layers themselves.
6. `split_parameter`: why no part is ever taken for the whole.
7. `tensor_parts`: which part of each parameter a rank has, for state and optimizers.

Words:

- *group*: the ranks that share layers. *Part*: what one rank has of a parameter or an activation;
  *whole*: all of it.
- *column*, *row*: a linear layer split by its outputs, or by its inputs. *Alone*: split without a
  partner, so that what goes in and comes out is whole.
- *block*: a module whose layers are split together. *Region*: what lies between the columns of a
  block and its row, where activations are split.
- *cut*: how one dimension is shared out over the ranks, in units that stay together (heads).
  *Split*: one rank's part of one parameter.
- *stack*: blocks that are called one after the other, for sequence parallelism.
"""

from shoal.strategies.tensor.layers.vocabulary import vocabulary_cross_entropy
from shoal.strategies.tensor.parallelize import parallelize
from shoal.strategies.tensor.plan.draft import draft
from shoal.strategies.tensor.plan.tensor_plan import Style, TensorPlan
from shoal.strategies.tensor.tensor_parallel import TensorParallelModel
from shoal.strategies.tensor.tensor_parts import TensorParts

__all__ = [
    "Style",
    "TensorParallelModel",
    "TensorParts",
    "TensorPlan",
    "draft",
    "parallelize",
    "vocabulary_cross_entropy",
]

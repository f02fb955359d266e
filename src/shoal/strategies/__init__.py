"""Strategies: who holds what, and when it travels.

The optimizers that go with these models, and the names users choose them by, are in
`shoal.optim.registry`.
"""

from shoal.strategies.data_parallel import *  # noqa: F403 - new ones are named there alone
from shoal.strategies.hybrid import HybridShardedModel as HybridShardedModel
from shoal.strategies.independent.async_model import AsyncModel as AsyncModel
from shoal.strategies.independent.local_model import LocalModel as LocalModel
from shoal.strategies.model import ShardedModel as ShardedModel
from shoal.strategies.pipeline.pipeline_parallel import (
    PipelineParallelModel as PipelineParallelModel,
)
from shoal.strategies.tensor.tensor_parallel import TensorParallelModel as TensorParallelModel

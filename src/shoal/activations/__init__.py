"""Activation checkpointing across ranks: who holds which activation, and how others get it.

Here, and only here, a "checkpoint" is an activation that is kept for backward; elsewhere the word
means state on disk.
"""

from shoal.activations.checkpoint_manager import CheckpointManager
from shoal.activations.directory import CheckpointDirectory
from shoal.activations.distributed_manager import DistributedCheckpointManager
from shoal.activations.memory_stats import DistributedMemoryStats, MemoryStats, format_bytes
from shoal.activations.model_parallel import ModelParallelCheckpointStrategy
from shoal.activations.pipeline_parallel import PipelineParallelCheckpointManager
from shoal.strategies.recomputation.policy import Policy

__all__ = [
    "CheckpointDirectory",
    "CheckpointManager",
    "DistributedCheckpointManager",
    "DistributedMemoryStats",
    "MemoryStats",
    "ModelParallelCheckpointStrategy",
    "PipelineParallelCheckpointManager",
    "Policy",
    "format_bytes",
]

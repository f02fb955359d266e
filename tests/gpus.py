"""How many ranks a machine can have over NCCL."""

from __future__ import annotations

import os

import pytest
import torch

import shoal

# NCCL from 2.30 on lets ranks share a GPU if it is told to. More than these are hardly a test.
_SHARING_RANKS = 4


def nccl_ranks() -> int:
    """One for each GPU, or several on one GPU where NCCL was told to allow it."""
    num_gpus = torch.cuda.device_count()
    if num_gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return max(num_gpus, _SHARING_RANKS)
    return num_gpus


def over_nccl(ranks: int) -> pytest.MarkDecorator:
    """Skips a test where NCCL cannot have so many ranks."""
    reason = f"needs {ranks} GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30"
    return pytest.mark.skipif(nccl_ranks() < ranks, reason=reason)


def own_device() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", shoal.world().rank % torch.cuda.device_count())

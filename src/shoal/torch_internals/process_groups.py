"""Torch's process groups: their options, and the store of the one that the script made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, Work


def default_store() -> Store:
    """The store of the process group that the script made."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def gloo_options(device: Any, timeout: timedelta) -> Any:
    """Options of a Gloo group that connects through one device, within a time."""
    kind: Any = dist.ProcessGroupGloo  # torch's types do not know its options
    options = kind._Options()
    options._devices = [device]
    options._timeout = timeout
    return options


def nccl_options(kind: Any, timeout: timedelta) -> Any:
    """Options of an NCCL group that connects within a time."""
    options = kind.Options()
    options._timeout = timeout
    return options


def set_timeout(group: Any, timeout: timedelta) -> None:
    """How long operations of a group may take from now on."""
    group._set_default_timeout(timeout)


def all_gather_flat(group: Any, whole: torch.Tensor, own: torch.Tensor) -> Work:
    """Gathers parts of equal size into one tensor."""
    work: Work = group._allgather_base(whole, own)
    return work


def reduce_scatter_flat(
    group: Any, own: torch.Tensor, whole: torch.Tensor, op: Any, timeout: timedelta
) -> Work:
    """Reduces one tensor over the ranks, of which each keeps its part; parts are of equal size."""
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.timeout = op, timeout
    work: Work = group._reduce_scatter_base(own, whole, options)
    return work

"""Torch's process groups."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shoal
from needs import needs
from shoal.torch_internals import process_groups

SECONDS = timedelta(seconds=30)


def group_of_one() -> dist.ProcessGroup:
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options = process_groups.gloo_options(device, SECONDS)
    made: dist.ProcessGroup = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    return made


def test_a_gloo_group_is_made_with_options_and_gets_another_timeout() -> None:
    group = group_of_one()
    process_groups.set_timeout(group, timedelta(days=1))
    numbers = torch.ones(2)
    group.allreduce([numbers]).wait()
    assert numbers.tolist() == [1, 1], needs("a Gloo group of our own options works")


def test_parts_are_gathered_into_one_tensor() -> None:
    group = group_of_one()
    whole = torch.zeros(2)
    process_groups.all_gather_flat(group, whole, torch.ones(2)).wait()
    assert whole.tolist() == [1, 1], needs("a group gathers into one tensor")


def test_the_store_of_the_scripts_own_group_is_found() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        process_groups.default_store().set("key", "value")
        assert store.num_keys() > 0, needs("the store of the script's group is found")
    finally:
        dist.destroy_process_group()


def nccl_group_of_one() -> list[float]:
    options = process_groups.nccl_options(dist.ProcessGroupNCCL, SECONDS)
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    process_groups.set_timeout(group, timedelta(days=1))
    whole = torch.zeros(2, device="cuda")
    process_groups.all_gather_flat(group, whole, torch.ones(2, device="cuda")).wait()
    own, op = torch.zeros(2, device="cuda"), dist.ReduceOp.SUM
    process_groups.reduce_scatter_flat(group, own, whole + 1, op, timedelta(days=1)).wait()
    numbers: list[float] = [*whole.tolist(), *own.tolist()]
    return numbers


@pytest.mark.gpu
def test_an_nccl_group_takes_options() -> None:
    # In a process of its own: NCCL keeps sockets open until its process ends.
    (numbers,) = shoal.run(nccl_group_of_one, ranks=1)
    assert numbers == [1, 1, 2, 2], needs("an NCCL group of our own options works")

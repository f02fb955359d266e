"""Hybrid sharding: several groups of ranks that each hold all shards between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from strategies.loops import (
    assert_same,
    data,
    local,
    momentum,
    one_step,
    run,
    seeded,
    whole_state,
)
from strategies.models import Experts

sharded = pytest.mark.parametrize("strategy", ["zero3", "fsdp"])


def train(strategy: str, replica: int, **options: Any) -> Any:
    module = seeded()
    model, optimizer = shoal.as_distributed(
        module, momentum(module), strategy=strategy, replica=replica, min_group_bytes=300, **options
    )
    for step in range(5):
        one_step(model, optimizer, local(step, items=12))
    held = sum(group.num_bytes_held for group in model.engine.groups)
    return model.state_dict(), held


@sharded
@pytest.mark.parametrize(("ranks", "replica"), [(4, 2), (6, 2), (6, 3), (3, 3), (2, 1)])
def test_training_equals_one_process(strategy: str, ranks: int, replica: int) -> None:
    expected = one_process_of_twelve()
    for state, _ in run(train, strategy, replica, ranks=ranks):
        assert_same(state, expected)


def one_process_of_twelve() -> Any:
    model = seeded()
    optimizer = momentum(model)
    for step in range(5):
        one_step(model, optimizer, data(step, items=12))
    return whole_state(model)


def test_memory_is_divided_by_the_ranks_of_a_replica() -> None:
    by_replica = {r: [held for _, held in run(train, "fsdp", r, ranks=4)] for r in (1, 2, 4)}
    assert sum(by_replica[2]) == pytest.approx(2 * sum(by_replica[1]), rel=0.3)
    assert sum(by_replica[4]) == pytest.approx(4 * sum(by_replica[1]), rel=0.6)


def different_experts(strategy: str) -> Any:
    """Each rank uses another expert; all count as used on every rank."""
    torch.manual_seed(0)
    module = Experts().double()
    model, _ = shoal.as_distributed(
        module, momentum(module), strategy=strategy, replica=2, min_group_bytes=0
    )
    rank = shoal.world().rank
    x = torch.ones(2, 5, dtype=torch.float64)
    model(x, torch.full((2,), min(rank, 2))).sum().backward()
    return {name for name, _ in model.named_parameters() if model.gradient_shard(name) is None}


@sharded
def test_what_one_replica_used_the_other_knows(strategy: str) -> None:
    for unused in run(different_experts, strategy, ranks=4):
        assert {name.rsplit(".", 2)[0] for name in unused} == {"experts.3"}


@pytest.mark.parametrize(
    ("strategy", "replica", "message"),
    [
        ("ddp", 2, "replica= is for sharded parameters"),
        ("fsdp", 3, "replica must divide the number of ranks, 4; got 3"),
        ("fsdp", 0, "replica must divide"),
    ],
)
def test_refusals(strategy: str, replica: int, message: str) -> None:
    def wrap() -> None:
        shoal.as_distributed(nn.Linear(2, 2), strategy=strategy, replica=replica)

    with pytest.raises(ValueError, match=message):
        run(wrap, ranks=4)

"""Activations of stages that have many micro-batches under way, on stages that have few."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from pools import Team
from shoal.activations import Policy
from shoal.strategies.recomputation.stores.peer_store import PeerStore
from strategies.recomputation.recomputed import FOUR, DropBlock, compare, seed_all

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
def test_1f1b(recompute: str) -> None:
    compare(FOUR, "drop", "pipeline", Policy(recompute, "peer"))


def test_interleaved() -> None:
    options = {"schedule": "interleaved", "micro_batches": 8}
    compare(FOUR, "deep", "pipeline", "peer", **options)


def test_hybrid() -> None:
    compare(Team("memory", 8), "drop", "hybrid", "peer", tensor=2, pipeline=4)


def test_sharded_parameters() -> None:
    """What autograd saves of them is gathered, not given away."""
    policy = Policy("none", "peer")
    compare(Team("memory", 8), "gpt", "pipeline", policy, pipeline=4, zero=3)


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_processes(backend: str) -> None:
    compare(Team(backend, 4), "drop", "pipeline", "peer")


# Memory -----------------------------------------------------------------------------------------


def most_memory(activations: Any) -> tuple[int, int]:
    """The peak in the second step, and the bytes that this rank gave away."""
    seed_all(0)
    blocks = (DropBlock(64) for _ in range(16))
    module = nn.Sequential(nn.Embedding(9, 64), *blocks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy="pipeline", micro_batches=8, activations=activations
    )
    world = shoal.world()
    tokens, targets = torch.randint(0, 9, (128,)), torch.randn(128, 64)
    for _ in range(2):
        gc.collect()
        memory = world.stats().memory
        before = memory["activations"].current if "activations" in memory else 0
        world.barrier()
        world.reset_stats()
        model.train_step(tokens, targets, F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    stats = world.stats()
    given = stats["give"].num_bytes if "give" in stats else 0
    return stats.memory["activations"].peak - before, given


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_stages_are_evened_out(recompute: str) -> None:
    plain, _ = zip(*shoal.run(most_memory, 4, "memory", args=(recompute,)), strict=True)
    evened, given = zip(
        *shoal.run(most_memory, 4, "memory", args=(Policy(recompute, "peer"),)), strict=True
    )
    unit = plain[3]
    assert plain == (4 * unit, 3 * unit, 2 * unit, unit)
    assert max(plain) / (sum(plain) / 4) == 1.6
    assert max(evened) / (sum(evened) / 4) <= 1.25
    assert max(evened) <= 3.1 * unit
    assert given == (2 * unit, 0, 0, 0)


# Graphs without a backward, and failures --------------------------------------------------------


def abandoned() -> list[int]:
    """What nobody asks for is let go of between batches."""
    world = shoal.world()
    store = PeerStore(world.backend)
    held = lambda: world.stats().memory["activations"].current  # noqa: E731
    store.holder = 1 - world.rank
    kept = store.put(torch.ones(100), "a")
    other = store.put(torch.full((100,), float(world.rank)), "b")
    world.barrier()
    found = [held()]
    world.barrier()
    del kept
    world.barrier()
    store.settle()
    world.barrier()
    found.append(held())
    world.barrier()
    assert store.get(other).tolist() == [float(world.rank)] * 100
    assert store.get(other).tolist() == [float(world.rank)] * 100  # it is back for good
    world.barrier()
    found.append(held())
    store.holder = None
    tensor = torch.ones(3)
    assert store.put(tensor, "c") is tensor
    world.barrier()
    return found


@pytest.mark.parametrize("backend", ["memory", "shm", "gloo"])
def test_what_is_given_comes_back_or_is_let_go(backend: str) -> None:
    team = Team(backend, 2)
    for found in team.run(abandoned):
        assert [each - found[2] for each in found] == [800, 400, 0]


# Wrong combinations -----------------------------------------------------------------------------


def wrap(strategy: str, options: dict[str, Any]) -> None:
    module = nn.Sequential(*(DropBlock() for _ in range(4)))
    shoal.as_distributed(module, strategy=strategy, activations="peer", **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("tensor", {}),
        ("pipeline", {"schedule": "gpipe"}),
        ("pipeline", {"schedule": "zero-bubble"}),
        ("pipeline", {"pipeline": 2, "data": 2}),
    ],
)
def test_without_room(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no stage has room for what another keeps"):
        shoal.run(wrap, 4, "memory", args=(strategy, options))


def test_blocks_that_a_pipeline_cuts() -> None:
    with pytest.raises(ValueError, match="the pipeline cuts block '0' into"):
        shoal.run(wrap, 4, "memory", args=("pipeline", {"schedule": "interleaved"}))

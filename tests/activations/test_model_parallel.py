"""Which rank keeps an activation where neighbours hold parts of the same layers."""

from __future__ import annotations

import pytest
import torch

import shoal
from pools import Team
from shoal.activations import DistributedCheckpointManager, ModelParallelCheckpointStrategy


def decide(tensor_parallel_size: int) -> tuple[bool, bool]:
    with DistributedCheckpointManager() as manager:
        strategy = ModelParallelCheckpointStrategy(manager, tensor_parallel_size)
        x = torch.ones(2)
        return strategy.should_checkpoint("a", x, True), strategy.should_checkpoint("a", x)


def test_a_split_layer_is_kept_on_the_first_rank_of_its_group(several: Team) -> None:
    one_group, alone = several.run(decide, several.size), several.run(decide, 1)
    assert [split for split, _ in one_group] == [True] + [False] * (several.size - 1)
    assert [split for split, _ in alone] == [True] * several.size
    assert [other for _, other in one_group] == [True] * several.size


def test_several_groups() -> None:
    assert [split for split, _ in shoal.run(decide, 4, "memory", args=(2,))] == [True, False] * 2


def ranks() -> list[int]:
    with DistributedCheckpointManager() as manager:
        strategy = ModelParallelCheckpointStrategy(manager, 1, {"b": 1})
        before = [strategy.get_checkpoint_rank(key) for key in "ab"]
        strategy.register_layer_rank("a", 1)
        for bad in (-1, manager.world_size):
            last = manager.world_size - 1
            message = f"the rank of 'a' must be from 0 to {last}; got {bad}"
            with pytest.raises(ValueError, match=message):
                strategy.register_layer_rank("a", bad)
        with pytest.raises(TypeError, match="the rank of 'a' must be a whole number; got '0'"):
            strategy.register_layer_rank("a", "0")
        return [*before, strategy.get_checkpoint_rank("a")]


def test_the_rank_of_a_layer(several: Team) -> None:
    assert several.run(ranks) == [[0, 1, 1]] * several.size


@pytest.mark.parametrize("size", [0, 3])
def test_groups_must_fit(size: int) -> None:
    with pytest.raises(ValueError, match=f"must divide the number of ranks, 4; got {size}"):
        shoal.run(decide, 4, "memory", args=(size,))


@pytest.mark.parametrize("size", ["2", True, 2.0])
def test_sizes_are_whole_numbers(size: object) -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size must be a whole number; got"):
        shoal.run(decide, 2, "memory", args=(size,))


def kept_once() -> tuple[int, float]:
    """A tensor-parallel group of all ranks keeps one copy, and all get it back."""
    world = shoal.world()
    with DistributedCheckpointManager() as manager:
        strategy = ModelParallelCheckpointStrategy(manager, world.size)
        activation = torch.full((64,), 3.0)
        if strategy.should_checkpoint("mlp", activation, is_tensor_parallel=True):
            manager.register_checkpoint("mlp", activation)
        stats = manager.get_aggregated_memory_stats()
        found = manager.retrieve_or_fetch("mlp", strategy.get_checkpoint_rank("mlp"))
        world.barrier()
        return stats.total_current_memory_used, found.sum().item()


def test_with_model_parallelism(several: Team) -> None:
    assert several.run(kept_once) == [(256, 192.0)] * several.size

"""The activations of the stages of a pipeline, and those at their boundaries."""

from __future__ import annotations

import gc

import pytest
import torch

import shoal
from pools import Team
from shoal.activations import DistributedCheckpointManager, PipelineParallelCheckpointManager
from shoal.errors import ClosedError, NotHeldError


def stages() -> dict[str, object]:
    gc.collect()  # a model of another test may still be counted
    world = shoal.world()
    stage = world.rank
    with DistributedCheckpointManager() as manager:
        own = PipelineParallelCheckpointManager(manager, world.size, stage)
        own.register_stage_checkpoint(f"inner {stage}", torch.full((4,), float(stage)))
        boundary = torch.full((2,), 10.0 + stage)
        own.register_stage_checkpoint(f"out {stage}", boundary, is_boundary=True)
        world.barrier()
        seen = {
            "by stage": [own.get_stage_checkpoints(each) for each in range(world.size)],
            "next": own.get_next_stage_boundaries(),
            "fetched": own.retrieve_stage_checkpoint("out 0").tolist(),
            "own": own.retrieve_stage_checkpoint(f"inner {stage}").tolist(),
            "lent": manager.get_checkpoint_keys(),
            "bytes": world.stats().memory["activations"].current,
        }
        world.barrier()
        own.clear_stage_checkpoints()
        world.barrier()
        seen["cleared"] = [own.get_stage_checkpoints(each) for each in range(world.size)]
        seen["left"] = world.stats().memory["activations"].current
        world.barrier()
        own.close()
        own.close()
        with pytest.raises(ClosedError):
            own.register_stage_checkpoint("x", boundary)
    return seen


def test_stages_and_boundaries(several: Team) -> None:
    size = several.size
    for stage, seen in enumerate(several.run(stages)):
        of_others = [[f"out {each}"] for each in range(size)]
        of_others[stage] = [f"inner {stage}", f"out {stage}"]
        assert seen["by stage"] == of_others
        assert seen["next"] == ([f"out {stage + 1}"] if stage + 1 < size else [])
        assert seen["fetched"] == [10.0, 10.0]
        assert seen["own"] == [float(stage)] * 4
        assert seen["lent"] == [f"out {stage}"]
        assert seen["bytes"] == 24
        assert seen["cleared"] == [[]] * size
        assert seen["left"] == 0


def inside_only() -> None:
    world = shoal.world()
    following = (world.rank + 1) % world.size
    with DistributedCheckpointManager() as manager:
        own = PipelineParallelCheckpointManager(manager, world.size, world.rank)
        own.register_stage_checkpoint(f"inner {world.rank}", torch.ones(1))
        world.barrier()
        with pytest.raises(NotHeldError):
            own.retrieve_stage_checkpoint(f"inner {following}")
        world.barrier()
        own.register_stage_checkpoint(f"inner {world.rank}", torch.ones(1), is_boundary=True)
        assert own.local_manager.get_checkpoint_keys() == []
        world.barrier()
        assert own.retrieve_stage_checkpoint(f"inner {following}").item() == 1
        world.barrier()
        own.close()


def test_what_is_no_boundary_is_not_lent(several: Team) -> None:
    several.run(inside_only)


def wrong_stages() -> None:
    with DistributedCheckpointManager() as manager:
        with pytest.raises(ValueError, match="num_stages must be at least 1; got 0"):
            PipelineParallelCheckpointManager(manager, 0, 0)
        for stage in (-1, 2):
            message = f"current_stage must be from 0 to 1; got {stage}"
            with pytest.raises(ValueError, match=message):
                PipelineParallelCheckpointManager(manager, 2, stage)
        for numbers in ((2.0, 0), (2, "0"), (2, True)):
            with pytest.raises(TypeError, match="must be a whole number; got"):
                PipelineParallelCheckpointManager(manager, *numbers)
        own = PipelineParallelCheckpointManager(manager, 2, 0)
        with own, pytest.raises(ValueError, match="stage must be from 0 to 1; got 2"):
            own.get_stage_checkpoints(2)


def test_wrong_stages(alone: Team) -> None:
    alone.run(wrong_stages)

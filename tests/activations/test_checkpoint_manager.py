"""What one rank keeps: by name, without a copy, and with the memory it takes."""

from __future__ import annotations

import pytest
import torch

from shoal.activations import CheckpointManager, MemoryStats
from shoal.errors import ClosedError, ShoalError
from shoal.torch_internals.tensors import num_storage_users


def test_keeps_the_tensor_without_its_graph() -> None:
    manager = CheckpointManager()
    activation = torch.ones(3, requires_grad=True) * 2
    manager.register_checkpoint("a", activation)
    kept = manager.retrieve_or_recompute("a", lambda: pytest.fail("not needed"))
    assert kept.data_ptr() == activation.data_ptr()
    assert not kept.requires_grad


def test_recomputes_what_is_not_there() -> None:
    manager = CheckpointManager()
    assert manager.retrieve_or_recompute("a", lambda: torch.full((2,), 7.0)).tolist() == [7, 7]
    assert manager.get_checkpoint_keys() == []


def test_keys_and_figures() -> None:
    manager = CheckpointManager()
    assert manager.get_memory_stats() == MemoryStats(0, 0, 0)
    manager.register_checkpoint("a", torch.zeros(256))
    manager.register_checkpoint("b", torch.zeros(128, dtype=torch.float64))
    assert manager.get_checkpoint_keys() == ["a", "b"]
    assert manager.get_memory_stats() == MemoryStats(2048, 2048, 2)
    manager.register_checkpoint("a", torch.zeros(8))  # takes the place of the first
    assert manager.get_memory_stats() == MemoryStats(1056, 2048, 2)
    manager.release_checkpoint("b")
    manager.release_checkpoint("never there")
    assert manager.get_memory_stats() == MemoryStats(32, 2048, 1)
    manager.clear_checkpoints()
    assert manager.get_memory_stats() == MemoryStats(0, 2048, 0)


def test_shared_memory_counts_once_and_whole() -> None:
    manager, base = CheckpointManager(), torch.zeros(100)
    manager.register_checkpoint("a", base[:10])
    manager.register_checkpoint("b", base[50:])
    assert manager.get_memory_stats() == MemoryStats(400, 400, 2)
    manager.release_checkpoint("a")
    assert manager.get_memory_stats().current_memory_used == 400
    manager.release_checkpoint("b")
    assert manager.get_memory_stats().current_memory_used == 0


def test_a_tensor_that_was_changed_is_an_error() -> None:
    manager, activation = CheckpointManager(), torch.zeros(4)
    manager.register_checkpoint("a", activation)
    activation.add_(1)
    with pytest.raises(ShoalError, match="'a' was changed in place after it was registered"):
        manager.retrieve_or_recompute("a", lambda: activation)


def test_tensors_of_inference_mode() -> None:
    manager = CheckpointManager()
    with torch.inference_mode():
        manager.register_checkpoint("a", torch.ones(2))
    assert manager.retrieve_or_recompute("a", lambda: torch.zeros(2)).sum().item() == 2


def test_closing_releases_everything_and_twice_is_fine() -> None:
    with CheckpointManager() as manager:
        activation = torch.zeros(4)
        before = num_storage_users(activation)
        manager.register_checkpoint("a", activation)
        assert num_storage_users(activation) == before + 1
    manager.close()
    assert num_storage_users(activation) == before
    assert manager.get_memory_stats() == MemoryStats(0, 16, 0)
    with pytest.raises(ClosedError, match="was closed"):
        manager.register_checkpoint("a", torch.zeros(1))


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        ([1.0], "must be a tensor; got a list"),
        (torch.ones(2, device="meta"), "on the meta device"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_be_kept(activation: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CheckpointManager().register_checkpoint("a", activation)


def test_names_are_strings() -> None:
    with pytest.raises(TypeError, match="layer_id must be a string; got 3"):
        CheckpointManager().register_checkpoint(3, torch.ones(1))

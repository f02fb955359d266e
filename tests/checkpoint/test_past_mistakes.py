"""Mistakes that others have made with checkpoints, each with what must hold instead."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.training import (
    assert_same,
    build,
    load_and_train,
    on_ranks,
    state,
    train,
    train_and_save,
    wrap,
)
from shoal.checkpoint.disk.filesystem import FileSystem
from shoal.checkpoint.load import slice_reader, transaction
from shoal.checkpoint.tools import open_any
from shoal.errors import CheckpointMismatchError


def test_restore_does_not_insist_on_the_saved_world_size(tmp_path: Path) -> None:
    """P27: neither on the number of ranks, nor on which rank reads what, nor on the strategy."""
    saved = on_ranks(train_and_save, 4, tmp_path, "zero3", [0])[0]
    for strategy, ranks in (("zero3", 3), ("ddp", 1), ("zero1", 5)):
        for loaded, _ in on_ranks(load_and_train, ranks, tmp_path, strategy, []):
            assert_same(loaded, saved)


def move(path: Path, strategy: str) -> Any:
    model, optimizer = wrap(strategy, *build())
    shoal.load(path, model, optimizer)
    world = shoal.world()
    shoal.save(path, model, optimizer)
    return world.size, model.options["replica"], model.engine.shard_group.size


def test_the_saved_world_size_is_forgotten_after_a_restore(tmp_path: Path) -> None:
    """P28: after a restore on three ranks everything is of three ranks, also what it saves."""
    on_ranks(train_and_save, 4, tmp_path, "zero3", [0])
    assert open_any(tmp_path).written_by["ranks"] == 4
    assert on_ranks(move, 3, tmp_path, "zero2") == [(3, 1, 3)] * 3
    source = open_any(tmp_path)
    assert (source.written_by["ranks"], source.written_by["strategy"]) == (3, "zero2")
    assert (len(source.files), len(source.values["random"])) == (3, 3)


def freeze_later(path: Path, strategy: str, do: str) -> Any:
    """Momentum of a layer that was frozen after some steps, and of groups that were emptied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 13)).double()
    groups = [{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD([*groups, {"params": [], "lr": 7.0}], lr=0.1, momentum=0.9)
    model, optimizer = wrap(strategy, model, optimizer)
    if do == "save":
        train(model, optimizer, [0, 1])
        model[0].requires_grad_(False)
        train(model, optimizer, [2])
        shoal.save(path, model, optimizer)
    else:
        model[0].requires_grad_(False)
        shoal.load(path, model, optimizer)
    return state(model, optimizer)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_state_of_frozen_parameters_and_empty_groups_is_kept(tmp_path: Path, strategy: str) -> None:
    saved = on_ranks(freeze_later, 2, tmp_path, strategy, "save")[0]
    assert "0/0/momentum_buffer" in saved
    assert saved["0/group 4/lr"] == 7.0
    for loaded in on_ranks(freeze_later, 3, tmp_path, "zero2", "load"):
        assert_same(loaded, saved)


def test_a_save_takes_no_memory_with_it(tmp_path: Path) -> None:
    """Neither the state that was saved nor copies of it stay alive."""
    model, optimizer = build()
    train(model, optimizer, [0])

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    shoal.save(tmp_path, model, optimizer, wait=False).wait()
    before = count()
    for _ in range(3):
        shoal.save(tmp_path, model, optimizer, keep=1)
        shoal.save(tmp_path, model, optimizer, keep=1, wait=False).wait()
    assert count() <= before


# Only what is needed -------------------------------------------------------------------------

WIDE = 1 << 19  # elements: eight chunks of checksums


def save_wide(path: Path, strategy: str) -> Any:
    model = nn.Linear(WIDE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = wrap(strategy, model, optimizer)
    model(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    shoal.save(path, model, optimizer)


class CountingDisk(FileSystem):
    """Counts the bytes that are read of data."""

    num_bytes = 0

    def open(self, path: Path) -> Any:
        file = super().open(path)
        inner = file.read_into

        def read_into(place: int, target: memoryview) -> int:
            if path.suffix == ".safetensors":
                self.num_bytes += len(target)
            return inner(place, target)

        file.read_into = read_into  # type: ignore[method-assign]
        return file


def load_wide(path: Path, strategy: str) -> Any:
    """How many bytes this rank has read."""
    model = nn.Linear(WIDE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = wrap(strategy, model, optimizer)
    disk = CountingDisk()
    shoal.load(path, model, optimizer, filesystem=disk)
    return disk.num_bytes


def test_what_does_not_fit_is_told_before_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(WIDE, 1)
    shoal.save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    num_read = []

    def read(source: Any, wanted: Any, is_unwanted: threading.Event) -> None:
        assert is_unwanted.wait(30)
        num_read.append(slice_reader.read(source, wanted, is_unwanted))

    monkeypatch.setattr(transaction, "read", read)
    with pytest.raises(CheckpointMismatchError, match="AdamW"):
        shoal.load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    assert num_read == [0]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_each_rank_writes_a_part(tmp_path: Path, strategy: str) -> None:
    """Each element once, all ranks about as many: also where everybody has everything."""
    on_ranks(save_wide, 4, tmp_path, strategy)
    source = open_any(tmp_path)
    sizes = [record.num_bytes for record in source.files]
    total = 2 * 4 * WIDE
    assert total < sum(sizes) < total + 200_000
    assert max(sizes) - min(sizes) < 60_000


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    on_ranks(save_wide, 3, tmp_path, "zero3")
    counts = on_ranks(load_wide, 4, tmp_path, "zero3")
    chunk = 1 << 18
    own = WIDE  # a fourth of four bytes for each element; and as much of momentum
    assert all(2 * own < count < 2 * (own + 3 * chunk) for count in counts), counts

"""Killed at any write, sync, rename or removal, a folder has the old checkpoint or the new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.memory_disk import MemoryDisk
from checkpoint.training import assert_same, on_ranks, state, train, wrap
from shoal.checkpoint.tools import open_any, verify
from shoal.errors import CheckpointError, PeerError

ROOT = Path("run")
OUTCOMES = [(names, data) for names in (True, False) for data in ("all", "none", "half")]


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Linear(7, 13)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save_twice(disk: MemoryDisk, strategy: str, crash_at: int | None, options: Any) -> Any:
    """Returns where the second save began, and the state at each save."""
    model, optimizer = wrap(strategy, *small())
    train(model, optimizer, [0])
    states = [state(model, optimizer)]
    shoal.save(ROOT, model, optimizer, step=0, filesystem=disk)
    shoal.world().barrier()
    begin = len(disk.operations)
    shoal.world().barrier()
    disk.crash_at = crash_at
    train(model, optimizer, [1])
    states.append(state(model, optimizer))
    shoal.save(ROOT, model, optimizer, step=1, filesystem=disk, **options).wait()
    return begin, states


def check_survivors(disk: MemoryDisk, states: Any) -> set[int | None]:
    """Whatever survives of a disk, there is one of the two states on it; returns which."""
    steps = set()
    for names, data in OUTCOMES:
        found = disk.after_crash(keep_names=names, keep_data=data)
        model, optimizer = small()
        step = shoal.load(ROOT, model, optimizer, filesystem=found, fallback=False).step
        assert step in (0, 1)
        assert_same(state(model, optimizer), states[step])
        verify(open_any(ROOT, found))
        steps.add(step)
    # What is left behind is in nobody's way.
    again = disk.after_crash(keep_names=True, keep_data="half")
    shoal.save(ROOT, model, optimizer, filesystem=again)
    assert [name for name in again.names(ROOT) if name.startswith(".")] == []
    return steps


def crash_everywhere(strategy: str, ranks: int, **options: Any) -> list[str]:
    """Loses power at each operation of the second save; returns what these were."""
    disk = MemoryDisk()
    begin, states = on_ranks(save_twice, ranks, disk, strategy, None, options)[0]
    total = len(disk.operations)
    seen = [check_survivors(disk.replay(count), states) for count in range(begin, total + 1)]
    assert seen[0] == {0}
    assert seen[-1] == {1}
    return disk.operations[begin:]


def test_alone() -> None:
    operations = {each.split()[0] for each in crash_everywhere("ddp", 1)}
    of_files = {"create", "reserve", "write", "sync"}
    assert operations == {"make_folder", *of_files, "sync_folder", "rename"}


def test_two_ranks() -> None:
    operations = crash_everywhere("zero3", 2)
    assert "sync data-00001.safetensors" in operations
    assert operations[-2:] == ["rename LATEST", "sync_folder run"]


def test_while_old_ones_are_removed() -> None:
    assert "remove_file manifest.json" in crash_everywhere("zero1", 2, keep=1)


def test_in_the_background() -> None:
    operations = crash_everywhere("zero3", 2, wait=False)
    assert operations[-2:] == ["rename LATEST", "sync_folder run"]


def test_ranks_that_run_into_it() -> None:
    """Not replayed: the ranks are really cut off, and find no way to go on."""
    disk = MemoryDisk()
    begin, states = on_ranks(save_twice, 2, disk, "zero2", None, {})[0]
    for crash_at in range(begin, len(disk.operations), 7):
        crashed = MemoryDisk()
        with pytest.raises(PeerError, match="PowerLoss"):
            on_ranks(save_twice, 2, crashed, "zero2", crash_at, {})
        check_survivors(crashed, states)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(strategy: str, ranks: int) -> None:
    assert crash_everywhere(strategy, ranks)


# One rank fails, the machine lives on ---------------------------------------------------------


def save_with_trouble(disk: MemoryDisk, operation: str, name: str, wait: bool) -> Any:
    model, optimizer = wrap("zero3", *small())
    train(model, optimizer, [0])
    shoal.save(ROOT, model, optimizer, step=0, filesystem=disk)
    shoal.world().barrier()
    disk.fail = lambda what, path: what == operation and path.name == name
    with pytest.raises(CheckpointError) as error:
        shoal.save(ROOT, model, optimizer, step=1, filesystem=disk, wait=wait).wait()
    shoal.world().barrier()
    disk.fail = lambda what, path: False
    step = shoal.load(ROOT, model, optimizer, filesystem=disk, fallback=False).step
    shoal.save(ROOT, model, optimizer, step=2, filesystem=disk)
    return str(error.value), step


TROUBLES = [
    ("create", "data-00001.safetensors"),
    ("write", "data-00001.safetensors"),
    ("write", "data-00000.safetensors"),
    ("sync", "data-00002.safetensors"),
    ("create", "manifest.json"),
    ("write", "manifest.json"),
    ("sync", "manifest.json"),
    ("sync_folder", ".new-000002-step-1"),
    ("rename", "000002-step-1"),
    ("sync_folder", "run"),
    ("create", ".LATEST-000002-step-1"),
    ("rename", "LATEST"),
]


@pytest.mark.parametrize(
    ("operation", "name", "wait"),
    [(*trouble, bool(number % 2)) for number, trouble in enumerate(TROUBLES)],
)
def test_an_error_of_one_rank_is_raised_by_all(operation: str, name: str, wait: bool) -> None:
    disk = MemoryDisk()
    for text, step in on_ranks(save_with_trouble, 3, disk, operation, name, wait):
        assert "No space left on device" in text
        assert step == 0
    assert disk.names(ROOT)[-2].endswith("step-2")
    assert not [each for each in disk.names(ROOT) if each.startswith(".")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("operation", "name", "wait"),
    [(*trouble, bool((number + 1) % 2)) for number, trouble in enumerate(TROUBLES)],
)
def test_more_errors_of_one_rank(operation: str, name: str, wait: bool) -> None:
    test_an_error_of_one_rank_is_raised_by_all(operation, name, wait)


def test_an_error_on_a_real_disk(tmp_path: Path) -> None:
    """A folder that cannot be made is named."""
    (tmp_path / "file").write_text("")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="file"):
        shoal.save(tmp_path / "file" / "run", model)

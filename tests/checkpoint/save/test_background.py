"""Saves in the background: training goes on, its changes are not saved, errors reach every rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import pools
import shoal
from checkpoint.memory_disk import MemoryDisk
from checkpoint.training import assert_same, build, on_ranks, state, train, wrap
from shoal.checkpoint.save import background
from shoal.checkpoint.tools import open_any, verify
from shoal.errors import CheckpointError

ROOT = Path("run")


def save_and_go_on(path: Path, strategy: str) -> Any:
    model, optimizer = wrap(strategy, *build())
    states = []
    for step in range(4):
        train(model, optimizer, [step])
        states.append(state(model, optimizer))
        saving = shoal.save(path, model, optimizer, step=step, wait=False, keep=2)
    train(model, optimizer, [9])
    assert not saving.is_agreed
    saving.wait()
    assert saving.is_agreed
    return states


def load(path: Path, strategy: str) -> Any:
    model, optimizer = wrap(strategy, *build())
    return shoal.load(path, model, optimizer).step, state(model, optimizer)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_was_there_when_it_was_called(tmp_path: Path, strategy: str) -> None:
    states = on_ranks(save_and_go_on, 3, tmp_path, strategy)[0]
    for step, loaded in on_ranks(load, 2, tmp_path, "zero2"):
        assert step == 3
        assert_same(loaded, states[3])
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["000003-step-2", "000004-step-3", "LATEST"]
    files = sorted(each.name for each in (tmp_path / "000004-step-3").iterdir())
    assert files == [*(f"data-{rank:05d}.safetensors" for rank in range(3)), "manifest.json"]
    verify(open_any(tmp_path))


class GatedDisk(MemoryDisk):
    """Writes wait until somebody opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def _happens(self, operation: str, path: Path, *details: Any) -> None:
        if operation == "write" and threading.current_thread().name == "shoal-save":
            assert self.gate.wait(20)
        super()._happens(operation, path, *details)


def save_and_train_on(disk: GatedDisk) -> Any:
    model, optimizer = wrap("zero3", *build())
    train(model, optimizer, [0])
    saved = state(model, optimizer)
    saving = shoal.save(ROOT, model, optimizer, filesystem=disk, wait=False)
    train(model, optimizer, [1, 2])  # nothing has been written yet
    assert disk.names(ROOT) == [".new-000001"]
    shoal.world().barrier()
    disk.gate.set()
    saving.wait()
    return saved


def test_training_goes_on_meanwhile() -> None:
    disk = GatedDisk()
    saved = on_ranks(save_and_train_on, 3, disk)[0]
    model, optimizer = build()
    shoal.load(ROOT, model, optimizer, filesystem=disk)
    assert_same(state(model, optimizer), saved)


def fail_in_background(disk: MemoryDisk, next_call: str) -> str:
    model, optimizer = wrap("zero3", *build())
    shoal.save(ROOT, model, optimizer, step=0, filesystem=disk)
    shoal.world().barrier()
    disk.fail = lambda operation, path: path.name == "data-00001.safetensors"
    shoal.save(ROOT, model, optimizer, step=1, filesystem=disk, wait=False)
    train(model, optimizer, [0])
    with pytest.raises(CheckpointError) as error:
        getattr(shoal, next_call)(ROOT, model, optimizer, filesystem=disk)
    disk.fail = lambda operation, path: False
    assert shoal.load(ROOT, model, optimizer, filesystem=disk).step == 0
    return str(error.value)


@pytest.mark.parametrize("next_call", ["save", "load"])
def test_an_error_surfaces_at_the_next_call(next_call: str) -> None:
    for text in on_ranks(fail_in_background, 3, MemoryDisk(), next_call):
        assert "data-00001.safetensors" in text
        assert "No space left" in text


def test_alone(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, [0])
    saved = state(model, optimizer)
    saving = shoal.save(tmp_path, model, optimizer, wait=False)
    train(model, optimizer, [1])
    assert saving.wait() == tmp_path / "000001"
    shoal.load(tmp_path, model, optimizer)
    assert_same(state(model, optimizer), saved)


def in_processes(path: str, strategy: str) -> Any:
    return save_and_go_on(Path(path), strategy)[-1]


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.full)])
def test_between_processes(tmp_path: Path, backend: str) -> None:
    """Also parameters that processes have one copy of between them."""
    saved = pools.Team(backend, 2).run(in_processes, str(tmp_path), "zero3")
    for step, loaded in on_ranks(load, 3, tmp_path, "zero1"):
        assert step == 3
        assert_same(loaded, saved[0])
    again = pools.Team(backend, 2).run(load, tmp_path, "fsdp")
    assert_same(again[1][1], saved[0])


def test_no_thread_is_left(tmp_path: Path) -> None:
    model, optimizer = build()
    before = set(threading.enumerate())  # where ranks of other tests meet, a thread serves them
    saving = shoal.save(tmp_path, model, optimizer, wait=False)
    saving.wait()
    assert set(threading.enumerate()) <= before
    assert torch.is_tensor(next(model.parameters()))


def fail_again_and_again(disk: MemoryDisk) -> str:
    """Not even the word that it has failed can be written; nobody waits for it."""
    model, optimizer = wrap("zero3", *build())
    shoal.world().barrier()
    if shoal.world().rank == 0:
        disk.fail = lambda operation, path: "00001" in path.name and path.name != ".new-000001"
    shoal.world().barrier()
    with pytest.raises(CheckpointError) as error:
        shoal.save(ROOT, model, optimizer, filesystem=disk, wait=False).wait()
    return str(error.value)


def test_an_error_that_cannot_be_told() -> None:
    for text in on_ranks(fail_again_and_again, 3, MemoryDisk()):
        assert "data-00001.safetensors" in text


def test_copies_go_where_the_last_ones_were(tmp_path: Path) -> None:
    """And what is saved is what was there, also if it is less than before."""
    for width in (300, 300, 290, 40):
        model = torch.nn.Linear(width, 50)
        shoal.save(tmp_path, model, wait=False).wait()
        arena = background._copies[threading.current_thread()]
        assert arena.nbytes >= sum(p.nbytes for p in model.parameters())
        other = torch.nn.Linear(width, 50)
        shoal.load(tmp_path, other)
        assert_same(state(other), state(model))
    assert arena.nbytes < 40_000  # not that of the largest

"""A rank that has several cores writes several files at once."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shoal
from checkpoint.memory_disk import MemoryDisk
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
from shoal.checkpoint import saving
from shoal.checkpoint.disk.filesystem import opened
from shoal.checkpoint.save.writing import Outgoing, shares, write_file
from shoal.checkpoint.tools import open_any, verify
from shoal.errors import CheckpointError
from shoal.sharding.extent import Extent
from shoal.torch_support.concurrency import Abandoned

CORES = 6


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """And files that are worth it."""
    monkeypatch.setattr(saving, "own_cores", lambda: frozenset(range(CORES)))
    monkeypatch.setattr(saving, "_LEAST_BYTES", 64)


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.rglob("*.safetensors"))


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "zero3"), (3, "fsdp")])
def test_moved_to_other_ranks(tmp_path: Path, ranks: int, strategy: str) -> None:
    saved = on_ranks(train_and_save, ranks, tmp_path, strategy, [0, 1])[0]
    assert len(names_in(tmp_path)) > ranks
    verify(open_any(tmp_path))
    loaded, after = on_ranks(load_and_train, 2, tmp_path, "zero1", [2])[0]
    assert_same(loaded, saved)
    model, optimizer = build()
    train(model, optimizer, [0, 1, 2])
    assert_same(after, state(model, optimizer), tolerance=1e-5)


def test_as_many_as_there_are_cores(tmp_path: Path) -> None:
    on_ranks(train_and_save, 2, tmp_path, "zero3", [0])
    assert names_in(tmp_path) == [
        f"data-{rank:05d}{number}.safetensors" for rank in range(2) for number in ("-1", "-2", "")
    ]


def test_one_if_they_would_be_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_LEAST_BYTES", 1 << 26)
    on_ranks(train_and_save, 2, tmp_path, "zero3", [0])
    assert names_in(tmp_path) == ["data-00000.safetensors", "data-00001.safetensors"]


def test_one_while_training_goes_on(tmp_path: Path) -> None:
    """Whose cores these are."""
    shoal.save(tmp_path, build()[0], wait=False).wait()
    assert names_in(tmp_path) == ["data-00000.safetensors"]


def fill_up(disk: MemoryDisk) -> str:
    model, optimizer = wrap("zero3", *build())
    shoal.save("run", model, optimizer, step=0, filesystem=disk)
    shoal.world().barrier()
    disk.fail = lambda operation, path: path.name == "data-00001-2.safetensors"
    with pytest.raises(CheckpointError) as error:
        shoal.save("run", model, optimizer, step=1, filesystem=disk)
    disk.fail = lambda operation, path: False
    assert shoal.load("run", model, optimizer, filesystem=disk).step == 0
    return str(error.value)


def test_what_is_not_wanted_is_not_written() -> None:
    disk, folder, is_unwanted = MemoryDisk(), Path("run"), threading.Event()
    disk.make_folder(folder)
    elements = torch.ones(1 << 20)

    def parts() -> Iterator[Tensor]:
        yield elements
        is_unwanted.set()
        yield elements

    outgoing = Outgoing("t", torch.float32, Extent.whole(torch.Size([2 << 20])), parts)
    with pytest.raises(Abandoned):
        write_file(disk, folder, "file", [outgoing], is_unwanted=is_unwanted)
    with opened(disk, folder / "file") as file:
        assert elements.nbytes < file.num_bytes < 2 * elements.nbytes


def test_a_full_disk() -> None:
    disk = MemoryDisk()
    for text in on_ranks(fill_up, 2, disk):
        assert "data-00001-2.safetensors: " in text
    assert disk.names(Path("run")) == ["000001-step-0", "LATEST"]


def test_cores_that_others_do_not_use() -> None:
    """Where each rank has been given its own, all of them are its own."""
    here = platform.node()
    own, others = frozenset(range(CORES)), frozenset(range(CORES, 2 * CORES))
    assert saving._fair_share([(here, own)]) == CORES
    assert saving._fair_share([(here, own), (here, others), ("elsewhere", own)]) == CORES
    assert saving._fair_share([(here, own), (here, own)]) == CORES // 2
    assert saving._fair_share([(here, own)] * 50) == 1


# Parts ---------------------------------------------------------------------------------------


class Sized:
    """All that matters of what is written."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_shares(sizes: list[int], count: int) -> None:
    outgoing: Any = [Sized(size) for size in sizes]
    divided = shares(outgoing, count)
    assert 1 <= len(divided) <= count
    assert all(divided) or not outgoing
    assert [each for share in divided for each in share] == outgoing
    largest = max((sum(each.num_bytes for each in share) for share in divided), default=0)
    assert largest <= sum(sizes) / count + max(sizes, default=0)


def test_saved_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        shoal.save(tmp_path, build()[0], wait=False).wait()


def test_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process, or where there are too many."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model, _ = build()
    shoal.save(tmp_path, model)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        shoal.save(tmp_path, model, keep=1)
    assert len(names_in(tmp_path)) > 1
    verify(open_any(tmp_path))

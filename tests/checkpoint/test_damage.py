"""Truncated, flipped, missing, foreign: refused with the file named, and nothing is half loaded."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.memory_disk import MemoryDisk
from checkpoint.training import assert_same, build, on_ranks, state, train, wrap
from shoal.checkpoint.disk.filesystem import FileSystem
from shoal.checkpoint.format.manifest import Manifest, signed
from shoal.checkpoint.format.tensor_file import CHUNK_BYTES
from shoal.checkpoint.load.slice_reader import Wanted, _plan, read_tensors
from shoal.checkpoint.load.tensor_source import open_checkpoint
from shoal.checkpoint.tools import open_any, verify
from shoal.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError
from shoal.sharding.extent import Extent

ROOT = Path("run")
DATA = "data-00000.safetensors"


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = nn.Linear(17, 11)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def saved(width: int = 17) -> tuple[MemoryDisk, Path]:
    """A checkpoint on a disk of its own, and its folder."""
    disk = MemoryDisk()
    model = nn.Linear(width, 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    path = shoal.save(ROOT, model, optimizer, filesystem=disk).path
    return disk, path


def refuses(disk: MemoryDisk, path: Path) -> CorruptCheckpointError:
    model, optimizer = small()
    before = state(model, optimizer)
    with pytest.raises(CorruptCheckpointError) as error:
        shoal.load(path, model, optimizer, filesystem=disk)
    assert_same(state(model, optimizer), before)
    return error.value


class CrowdedDisk(FileSystem):
    """Of a process that has too many files open."""

    def open(self, path: Path) -> Any:
        if path.name == DATA:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(path)


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    """An older checkpoint would have the same trouble, and nobody wants it in place of this one."""
    model, _ = small()
    for _ in range(2):
        shoal.save(tmp_path, model)
    with pytest.raises(CheckpointError, match="Too many open files") as error:
        shoal.load(tmp_path, model, filesystem=CrowdedDisk())
    assert not isinstance(error.value, CorruptCheckpointError)


@pytest.mark.parametrize("name", ["manifest.json", DATA])
def test_truncated_anywhere(name: str) -> None:
    disk, path = saved()
    whole = bytes(disk._find(path / name).data)
    for length in [*range(0, len(whole), 64), len(whole) - 1]:
        disk._find(path / name).data = bytearray(whole[:length])
        assert name in str(refuses(disk, path))
    disk._find(path / name).data = bytearray(whole + b"\0")
    assert name in str(refuses(disk, path))


def flips(data: bytearray, bits: range) -> Iterator[int]:
    """Flips one bit after the other, each back before the next."""
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        yield bit
        data[bit // 8] ^= 1 << bit % 8


def is_refused(action: Any) -> bool:
    try:
        action()
    except CorruptCheckpointError as error:
        return DATA in error.file
    return False


def refuse_flips(disk: MemoryDisk, path: Path, bits: range) -> None:
    """Every flip of the data is found by what a loader reads, and by a full check."""
    source = open_checkpoint(disk, path)
    keys = list(source.tensors)
    whole = read_tensors(source, keys)
    for bit in flips(disk._find(path / DATA).data, bits):
        source._headers.clear()
        assert is_refused(lambda: read_tensors(source, keys))
        if bit % 50 == 0:
            assert is_refused(lambda: verify(open_checkpoint(disk, path)))
    after = read_tensors(open_checkpoint(disk, path), keys)
    assert all(torch.equal(whole[key], after[key]) for key in keys)


def test_flipped_bits_of_a_manifest() -> None:
    disk, path = saved()
    data = disk._find(path / "manifest.json").data
    for bit in flips(data, range(len(data) * 8)):
        with pytest.raises(ValueError, match="checksum"):
            Manifest.parse(bytes(data))
        if bit % 4001 == 0:
            assert "manifest.json" in str(refuses(disk, path))


def test_some_flipped_bits() -> None:
    disk, path = saved(700)
    num_bits = disk.open(path / DATA).num_bytes * 8
    assert num_bits > 60_000 * 8
    refuse_flips(disk, path, range(8 * 9))  # the length in front
    refuse_flips(disk, path, range(0, num_bits, 1009))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_flipped_bit() -> None:
    """Read chunk by chunk, each with its own bits flipped: the others are not touched by them."""
    disk, path = saved(700)
    source, data = open_checkpoint(disk, path), disk._find(path / DATA).data
    every = read_tensors(source, source.tensors)
    wanted = [
        Wanted(key, Extent.whole(tensor.shape), tensor.view(-1)) for key, tensor in every.items()
    ]
    slices = list(_plan(source, wanted))
    begin = min(each.location.begin for each in slices)
    assert (
        begin + sum(each.location.end - each.location.begin for each in slices)
        == len(data)
        > 60_000
    )
    for _ in flips(data, range(begin * 8)):
        assert is_refused(lambda: source._read_header(0))
    file, scratch = disk.open(path / DATA), memoryview(bytearray(CHUNK_BYTES))
    for each in slices:
        assert list(each.chunks()) in ([], [0])
        for number in each.chunks():
            for _ in flips(data, range(each.location.begin * 8, each.location.end * 8)):
                assert is_refused(partial(each.read, number, file, scratch))
            each.read(number, file, scratch)


def test_flips_seen_by_load() -> None:
    disk, path = saved()
    data = disk._find(path / DATA).data
    for _ in flips(data, range(0, len(data) * 8, 811)):
        assert DATA in str(refuses(disk, path))


def test_the_tensor_is_named() -> None:
    disk, path = saved()
    disk._find(path / DATA).data[-1] ^= 1
    error = refuses(disk, path)
    assert error.tensor in open_any(path, disk).tensors
    assert error.file.endswith(DATA)


# Real files ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model, optimizer = small()
    shoal.save(tmp_path / "run", model, optimizer, step=1)
    return tmp_path / "run"


def error_of(path: Path) -> str:
    model, optimizer = small()
    before = state(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        shoal.load(path, model, optimizer)
    assert_same(state(model, optimizer), before)
    return str(error.value)


def test_a_missing_file(run: Path) -> None:
    (run / "000001-step-1" / DATA).unlink()
    assert "it is missing" in error_of(run)


def test_a_missing_manifest(run: Path) -> None:
    (run / "000001-step-1" / "manifest.json").unlink()
    assert "manifest.json: it is missing" in error_of(run)


def test_a_link_in_place_of_a_file(run: Path, tmp_path: Path) -> None:
    file = run / "000001-step-1" / DATA
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in error_of(run)


def test_a_link_in_place_of_a_checkpoint(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "000001-step-1", tmp_path / "elsewhere")
    (run / "000001-step-1").symlink_to(tmp_path / "elsewhere")
    assert "no checkpoint" in error_of(run)
    model, optimizer = small()
    shoal.load(run / "000001-step-1", model, optimizer)  # whoever names a link wants it followed


def test_a_pipe_in_place_of_a_file(run: Path) -> None:
    (run / "000001-step-1" / DATA).unlink()
    os.mkfifo(run / "000001-step-1" / DATA)
    assert "no plain file" in error_of(run)


def test_a_folder_in_place_of_a_file(run: Path) -> None:
    (run / "000001-step-1" / DATA).unlink()
    (run / "000001-step-1" / DATA).mkdir()
    assert DATA in error_of(run)


def test_a_newer_format(run: Path) -> None:
    manifest = run / "000001-step-1" / "manifest.json"
    text = manifest.read_bytes().partition(b"\n")[2]
    manifest.write_bytes(signed(b"{" + text.replace(b'"version": 1', b'"version": 2')))
    assert "version 2, and this shoal reads version 1" in error_of(run)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", ".hidden.safetensors"])
def test_a_file_somewhere_else(run: Path, name: str) -> None:
    manifest = run / "000001-step-1" / "manifest.json"
    text = manifest.read_bytes().partition(b"\n")[2]
    manifest.write_bytes(signed(b"{" + text.replace(DATA.encode(), name.encode())))
    assert "no name for a file" in error_of(run)


def test_nothing_there(tmp_path: Path) -> None:
    assert "there is no checkpoint" in error_of(tmp_path)
    assert "there is no checkpoint" in error_of(tmp_path / "nowhere")


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save(small()[0].state_dict(), tmp_path / "model.pt")
    assert "can run any code" in error_of(tmp_path / "model.pt")


# The next best -------------------------------------------------------------------------------


def three_checkpoints(path: Path) -> None:
    model, optimizer = wrap("zero3", *build())
    for step in range(3):
        train(model, optimizer, [step])
        shoal.save(path, model, optimizer, step=step)


def load_step(path: Path) -> Any:
    model, optimizer = wrap("zero2", *build())
    return shoal.load(path, model, optimizer).step


def load_loudly(path: Path, ranks: int) -> Any:
    with pytest.warns(CheckpointWarning, match="is damaged and is passed over"):
        return on_ranks(load_step, ranks, path)


def test_falls_back_to_the_newest_good_one(tmp_path: Path) -> None:
    on_ranks(three_checkpoints, 2, tmp_path)
    with open(tmp_path / "000003-step-2" / DATA, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    assert load_loudly(tmp_path, 3) == [1, 1, 1]
    (tmp_path / "000002-step-1" / "manifest.json").write_text("{}")
    assert load_loudly(tmp_path, 2) == [0, 0]
    with pytest.raises(CorruptCheckpointError, match="000003-step-2"):
        on_ranks(load_and_fail, 2, tmp_path)


def load_and_fail(path: Path) -> None:
    model, optimizer = wrap("zero2", *build())
    shoal.load(path, model, optimizer, fallback=False)


def load_with_one_bad_file(path: Path) -> Any:
    """Only some ranks read the bad file; all raise, and none has changed."""
    model, optimizer = wrap("zero3", *build())
    before = state(model, optimizer)
    with pytest.raises(CorruptCheckpointError) as error:
        shoal.load(path, model, optimizer, fallback=False)
    assert_same(state(model, optimizer), before)
    return error.value.file, error.value.tensor


def test_all_ranks_refuse_what_one_finds_damaged(tmp_path: Path) -> None:
    on_ranks(three_checkpoints, 4, tmp_path)
    file = tmp_path / "000003-step-2" / "data-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 64
    file.write_bytes(data)
    results = on_ranks(load_with_one_bad_file, 4, tmp_path)
    assert results == [results[0]] * 4
    assert results[0][0] == str(file)


@pytest.mark.parametrize("content", [b"", b"../../etc", b"\xff" * 300, b"000009-step-9\n"])
def test_a_damaged_pointer(tmp_path: Path, content: bytes) -> None:
    on_ranks(three_checkpoints, 1, tmp_path)
    (tmp_path / "LATEST").write_bytes(content)
    model, optimizer = build()
    if content.startswith(b"0"):
        with pytest.warns(CheckpointWarning, match="000009-step-9, which is not there"):
            assert shoal.load(tmp_path, model, optimizer).step == 2
    else:
        assert shoal.load(tmp_path, model, optimizer).step == 2

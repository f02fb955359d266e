"""What checkpoints ask of a real disk: room beforehand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.checkpoint.disk.filesystem import DISK
from shoal.system import libc


def file_system_of(path: Path) -> str:
    """By its longest mount point."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(where), kind) for _, where, kind, *_ in lines if path.is_relative_to(where)]
    return max(above)[1]


def test_room_is_kept(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "file")
    file.reserve(1 << 20)
    file.write(b"shoal")
    file.sync()
    file.close()
    status = (tmp_path / "file").stat()
    assert status.st_size == 5
    if file_system_of(tmp_path) in ("ext4", "xfs", "tmpfs"):
        assert status.st_blocks * 512 >= 1 << 20


def test_no_room(tmp_path: Path) -> None:
    """Known before anything is written."""
    file = DISK.create(tmp_path / "file")
    with pytest.raises(OSError, match=r"space|large"):
        file.reserve(1 << 60)
    file.close()


def test_where_hints_are_not_known() -> None:
    reader, writer = os.pipe()
    libc.reserve_blocks(writer, 100)
    libc.start_writing(writer, 0, 100)
    os.close(reader)
    os.close(writer)

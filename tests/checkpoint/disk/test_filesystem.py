"""A real disk: room beforehand, and names that are gone before what they occupied is freed."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

import pytest

from shoal.checkpoint.disk import filesystem
from shoal.checkpoint.disk.checkpoint_folder import CheckpointFolder
from shoal.checkpoint.disk.filesystem import (
    DISK,
    FileSystem,
    kept_open,
    remove_tree,
    wait_until_freed,
)
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With files, a link, a pipe and another folder."""
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (folder / name).write_bytes(bytes(10_000))
    (tmp_path / "outside").write_bytes(b"stays")
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    return folder


def held_files() -> list[str]:
    """Removed files that this process still has descriptors of."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # the one of the folder that was listed
            continue
    return [name for name in found if name.endswith(" (deleted)") and "/folder/" in name]


def test_names_are_gone_at_once(folder: Path) -> None:
    remove_tree(DISK, folder)
    assert not folder.exists()
    assert (folder.parent / "outside").read_bytes() == b"stays"
    wait_until_freed()
    assert held_files() == []
    assert not any(thread.name == "shoal-free" for thread in threading.enumerate())


def test_files_are_held_while_they_are_removed(folder: Path) -> None:
    with kept_open([folder / "a", folder / "b", folder / "nothing"]):
        (folder / "a").unlink()
        assert len(held_files()) == 1
    wait_until_freed()
    assert held_files() == []
    assert (folder / "b").exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_inherits_nothing(folder: Path) -> None:
    """It would keep the room on the disk taken."""
    reader, writer = os.pipe()
    with kept_open([folder / "a", folder / "b"]):
        (folder / "a").unlink()
        child = os.fork()
        if child == 0:
            os.write(writer, b"%d" % len(held_files()))
            os._exit(0)
        os.waitpid(child, 0)
        assert len(held_files()) == 1
    assert os.read(reader, 9) == b"0"
    os.close(reader)
    os.close(writer)
    wait_until_freed()


def test_many_files_are_not_all_held(tmp_path: Path) -> None:
    """Others need descriptors as well."""
    paths = [tmp_path / str(number) for number in range(100)]
    for path in paths:
        path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with kept_open(paths):
        assert len(os.listdir("/proc/self/fd")) <= before + 32
    wait_until_freed()


def test_several_threads_remove_and_wait(tmp_path: Path) -> None:
    errors = []

    def work(own: Path) -> None:
        try:
            for number in range(50):
                folder = own / str(number)
                folder.mkdir(parents=True)
                (folder / "file").touch()
                remove_tree(DISK, folder)
                wait_until_freed()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tmp_path / f"of {n}",)) for n in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    wait_until_freed()
    assert errors == []


def test_room_is_free_when_a_save_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a save that was killed."""
    settled = []
    monkeypatch.setattr(filesystem, "wait_until_freed", lambda: settled.append(leftover.exists()))
    leftover = tmp_path / ".new-000001" / "data"
    leftover.parent.mkdir()
    leftover.touch()
    CheckpointFolder(tmp_path).begin(None)
    assert settled == [False]


class NetworkDisk(FileSystem):
    """Has another name for a file that is removed while somebody holds it."""

    def remove_folder(self, path: Path) -> None:
        if held_files():
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        super().remove_folder(path)


def test_a_disk_that_keeps_names_of_what_is_held(folder: Path) -> None:
    remove_tree(NetworkDisk(), folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_removed(folder: Path) -> None:
    with pytest.raises(OSError, match="not empty"):
        DISK.remove_folder_with(folder, [folder / "a", folder / "b"])
    wait_until_freed()

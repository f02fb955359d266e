"""Ranks that mpiexec starts: told the same, watched the same, ended the same."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.watching import SLEEPER, assert_gone, words_of
from shoal.errors import LaunchError
from shoal.launch.mpi import mpiexec
from shoal.launch.script.launcher import LaunchConfig, launch

Write = Callable[[str], str]


needs_mpiexec = pytest.mark.skipif(
    not Path(sys.executable).with_name("mpiexec").exists(), reason="no mpiexec beside this Python"
)


@pytest.mark.mpi
@needs_mpiexec
def test_mpi_ranks_are_told_the_same(script: Write, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(
        "print(os.environ['RANK'], os.environ['SHOAL_BACKEND'], sys.argv[1:], flush=True)\n"
        "sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    )
    arguments = ("a b", "", '"q"', "--", "-n")
    assert launch(LaunchConfig(path, arguments, ranks=3, backend="mpi")) == 3
    out, err = capfd.readouterr()
    expected = [f"[rank {rank}] {rank} mpi {list(arguments)}" for rank in range(3)]
    assert sorted(out.splitlines()) == expected
    assert "rank 1 failed first (exit code 3)" in err


@pytest.mark.mpi
@needs_mpiexec
def test_mpi_has_folders_that_its_owner_can_use(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under a umask of 0777 Open MPI cannot write to the folder that it makes, except as root."""
    path = script("print(oct(os.umask(0)), flush=True)")
    before = os.umask(0o777)
    try:
        assert launch(LaunchConfig(path, ranks=2, backend="mpi")) == 0
    finally:
        os.umask(before)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] 0o77", "[rank 1] 0o77"]


@pytest.mark.mpi
@needs_mpiexec
def test_mpi_survivors_outlive_a_killed_rank_long_enough_to_speak(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "from mpi4py import MPI\n"
        "victim = MPI.COMM_WORLD.bcast(os.getpid(), root=1)\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if victim == os.getpid(): os.kill(victim, signal.SIGKILL)\n"
        "while os.path.exists(f'/proc/{victim}'): time.sleep(0.01)\n"
        "print('still here', flush=True)\n"
        "os._exit(1)"
    )
    assert launch(LaunchConfig(path, ranks=3, backend="mpi")) == 128 + 9
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] still here", "[rank 2] still here"]
    assert "rank 1 failed first (killed by SIGKILL)" in err


@pytest.mark.mpi
@needs_mpiexec
def test_no_mpi_rank_outlives_a_launcher_that_is_killed(
    script: Write, background: Callable[..., subprocess.Popen[str]]
) -> None:
    process = background("-n", "2", "--backend", "mpi", script(SLEEPER))
    lines = words_of(process, 2)
    process.kill()
    process.wait()
    for _, rank, child, _ in lines:
        assert_gone(int(rank))
        assert_gone(int(child))


def fake_mpiexec(folder: Path, version: str) -> None:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("mpiexec (Open MPI) 5.0.11", ["--with-ft", "ulfm"]),
        ("mpiexec (OpenRTE) 4.1.5", ["--enable-recovery"]),
        ("HYDRA build details:", ["-disable-auto-cleanup"]),
    ],
)
def test_each_mpiexec_is_called_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, words: list[str]
) -> None:
    fake_mpiexec(tmp_path, version)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    prefix, _ = mpiexec.command(4)
    assert prefix[0] == str(tmp_path / "mpiexec")
    assert prefix[-2:] == ["-n", "4"]
    assert set(words) <= set(prefix)


def test_an_mpiexec_that_gives_up_is_one_sentence(
    script: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refusal = "echo no slots today >&2; exit 9"
    monkeypatch.setattr(mpiexec, "command", lambda ranks: (["/bin/sh", "-c", refusal], {}))
    with pytest.raises(LaunchError, match=r"gave up \(exit code 9\): see what it says above"):
        launch(LaunchConfig(script(""), ranks=2, backend="mpi"))
    assert "[mpiexec] no slots today" in capfd.readouterr().err


def test_a_missing_mpiexec_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r'pip install "shoal\[mpi\]"'):
        mpiexec.command(2)


def test_a_strange_mpiexec_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, "something else 1.0")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match="Open MPI's or MPICH's"):
        mpiexec.command(2)

"""Ranks that a command starts: a small stand-in for mpiexec, and all the ways it can go wrong."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leaks
import shoal
from launch import worker
from shoal.errors import LaunchError
from shoal.launch.function.connect_back import run_command
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.outcome import Outcome

SOURCE = str(Path(shoal.__file__).resolve().parents[1])
# Like mpiexec: starts N copies, and ends with the first code that is not zero.
MPIEXEC = """
import os, subprocess, sys
count, size, *program = sys.argv[1:]
ranks = [
    subprocess.Popen(program, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": size})
    for rank in range(int(count))
]
codes = [rank.wait() for rank in ranks]
sys.stderr.write(f"ranks ended with {codes}\\n")
sys.exit(next((abs(code) for code in codes if code), 0))
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point, the launcher and a folder for temporary files that must end up empty."""
    (tmp_path / "worker_of_test.py").write_text(worker.SOURCE)
    (tmp_path / "mpiexec.py").write_text(MPIEXEC)
    (tmp_path / "temporary").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    fork_server()
    leaks.baseline()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Runs a function by way of the launcher, and looks for what it left."""

    def run(fn: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> list[Outcome]:
        command = [sys.executable, str(tmp_path / "mpiexec.py"), str(ranks), str(ranks)]
        command = options.pop("command", command)
        options = {"entry": "worker_of_test:main", "grace": 30.0, **options}
        try:
            return run_command(command, os.environ, fn, args, ranks, **options)
        finally:
            assert os.listdir(tmp_path / "temporary") == []

    return run


Run = Callable[..., list[Outcome]]


def rank() -> int:
    """The rank that this process is."""
    return int(os.environ["RANK"])


class TestRanks:
    def test_results_and_surroundings(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        outcomes = run(lambda x: (x, rank(), os.getcwd(), sys.path), "payload", ranks=3)
        expected = [("payload", number, str(tmp_path), sys.path) for number in range(3)]
        assert [outcome.value for outcome in outcomes] == expected
        assert not any(outcome.failed for outcome in outcomes)

    def test_output_is_passed_on(self, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
        def fn() -> None:
            print("out")
            print("err", file=sys.stderr)

        run(fn, ranks=1)
        captured = capfd.readouterr()
        assert captured.out == "out\n"
        assert captured.err == "err\nranks ended with [0]\n"

    def test_large_arguments_and_results(self, run: Run) -> None:
        outcomes = run(lambda data: data * 2, bytes(30_000_000))
        assert [len(outcome.value) for outcome in outcomes] == [60_000_000] * 2

    def test_exception_is_an_outcome(self, run: Run) -> None:
        def fn() -> int:
            if rank() == 1:
                raise KeyError("gone")
            return rank()

        good, bad = run(fn)
        assert good.value == 0
        assert isinstance(bad.error, KeyError)
        assert "KeyError: 'gone'" in bad.traceback

    def test_killed_rank_has_the_commands_last_words(self, run: Run) -> None:
        def fn() -> int:
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return rank()

        good, bad = run(fn)
        assert good.value == 0
        assert (bad.failed, bad.error) == (True, None)
        assert "ranks ended with [0, -9]" in bad.traceback

    def test_others_are_killed_after_the_grace(self, run: Run) -> None:
        def fn() -> None:
            if rank() == 1:
                raise ValueError("first")
            signal.pause()

        killed, failed = run(fn, grace=0.2)
        assert isinstance(failed.error, ValueError)
        assert (killed.failed, killed.error) == (True, None)


class TestCommand:
    def test_missing_command_is_named(self, run: Run) -> None:
        with pytest.raises(LaunchError, match=r"0 of 2 ranks.*(?s:.*)no-such-mpiexec"):
            run(rank, command=["no-such-mpiexec", "-n", "2"])

    def test_command_that_dies_early_says_why(self, run: Run) -> None:
        command = ["sh", "-c", "echo 'no slots left' >&2; exit 3"]
        with pytest.raises(LaunchError, match=r"exit code 3(?s:.*)no slots left"):
            run(rank, command=command)

    def test_ranks_that_never_come(self, run: Run) -> None:
        with pytest.raises(LaunchError, match=r"0 of 2 ranks.*within 0\.2 s"):
            run(rank, command=["sh", "-c", "exec sleep 600"], connect_timeout=0.2)

    def test_too_few_ranks(self, run: Run, tmp_path: Path) -> None:
        def fn() -> None:
            signal.pause()

        command = [sys.executable, str(tmp_path / "mpiexec.py"), "1", "2"]
        with pytest.raises(LaunchError, match=r"1 of 2 ranks.*within"):
            run(fn, command=command, connect_timeout=5.0, grace=0.1)

    def test_world_of_another_size(self, run: Run, tmp_path: Path) -> None:
        command = [sys.executable, str(tmp_path / "mpiexec.py"), "1", "1"]
        with pytest.raises(LaunchError, match=r"2 ranks were asked for.*world of 1"):
            run(rank, command=command)

    def test_command_killed_in_the_middle(self, run: Run, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)

        def fn() -> None:
            if rank() == 0:
                fifo.read_text()  # until the other is there too
                os.kill(os.getppid(), signal.SIGKILL)
            else:
                fifo.write_text("connected")
            signal.pause()

        assert all(outcome.failed for outcome in run(fn))

    def test_nothing_leaks_over_many_runs(self, run: Run) -> None:
        def count() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = count()
        for _ in range(5):
            with pytest.raises(LaunchError):
                run(rank, command=["false"])
        assert count() == before


def test_the_path_is_gone_before_the_last_rank_begins(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_fds, num_there = socket.send_fds, []

    def send(*args: Any) -> Any:
        num_there.append(len(os.listdir(tmp_path / "temporary")))
        return send_fds(*args)

    monkeypatch.setattr(socket, "send_fds", send)
    run(rank)
    assert num_there[-2:] == [1, 0]  # before these something is sent to the fork server


CALLER = """
import os, signal, sys
from shoal.launch.function.connect_back import run_command
def fn():
    print(os.getpid(), os.getppid(), flush=True)
    signal.pause()
command = [sys.executable, sys.argv[1], "1", "1"]
run_command(command, os.environ, fn, (), 1, entry="worker_of_test:main")
"""


def test_nothing_outlives_a_killed_caller(tmp_path: Path) -> None:
    paths = os.pathsep.join([SOURCE, str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", CALLER, str(tmp_path / "mpiexec.py")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pids = [int(word) for word in caller.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        caller.kill()
    assert len(pidfds) == 2
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(60_000)
        os.close(pidfd)
    assert os.listdir(tmp_path / "temporary") == []

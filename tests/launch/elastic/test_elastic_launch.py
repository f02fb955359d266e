"""`shoal launch --elastic` and `--join`: workers die in all ways, and the others go on."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from launch.conftest import LAUNCHER
from launch.watching import assert_gone
from shoal.errors import LaunchError
from shoal.launch.mpi import mpiexec
from shoal.launch.script.guard import spawn
from shoal.launch.script.launcher import LaunchConfig, launch
from shoal.launch.script.meeting_place import MeetingPlace
from shoal.meeting.address import elastic_address
from shoal.meeting.elastic_options import Elastic
from shoal.meeting.server import MeetingServer

SCRIPT = str(Path(__file__).with_name("counting.py"))
DEADLINE_S = 120
Background = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While the file is there, workers wait at the step where they are told to."""
    path = tmp_path / "hold"
    path.touch()
    monkeypatch.setenv("HOLD", str(path))
    return path


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def run(line: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*LAUNCHER, "--elastic", *line.split(), SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def counted(out: str) -> list[str]:
    """What ranks said at their end: rank and size."""
    return sorted(re.findall(r"counted (\d+ \d+)", out))


def at_step(process: subprocess.Popen[str], count: int) -> dict[int, tuple[int, int]]:
    """Waits for so many workers at their step: rank and pid, by worker."""
    found = {}
    while len(found) < count:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=DEADLINE_S)
        if match := re.match(r"\[worker (\d+)\] at (\d+) (\d+)", line):
            found[int(match[1])] = (int(match[2]), int(match[3]))
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_spare_takes_the_place_of_rank_0(backend: str) -> None:
    code, out, err = run(f"-n 2 --min 2 --spares 1 --backend {backend}", "6", "2", "0@3=KILL")
    assert code == 0, err
    assert counted(out) == ["0 2", "1 2"]
    assert "generation 2, 2 rank(s): worker 0 (rank 0) is gone: killed by SIGKILL; worker 2" in err
    assert err.endswith(
        "shoal: the run has finished with 2 rank(s); lost on the way:\n"
        "  worker 0 (rank 0): killed by SIGKILL; worker 2 took its place\n"
    )


@pytest.mark.mpi
def test_over_mpi_ranks_are_lost_and_the_others_train_on_as_over_shm(tmp_path: Path) -> None:
    """Rank 0, in the middle of a step, and another one later."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    losses = {}
    for backend in ("mpi", "shm"):
        line = [*LAUNCHER, "--elastic", "--backend", backend, "-n", "4", "--min", "2", str(script)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
        assert "generation 3, 2 rank(s): worker 2 (rank 1) is gone: killed" in done.stderr
        assert done.stderr.count("nobody took its place") == 2
        losses[backend] = re.findall(r"on 2 after 24: (\S+)", done.stdout)
    assert losses["mpi"] == losses["shm"]
    assert len(losses["shm"]) == 2


TRAINING = """
import os, signal, torch, shoal
from torch.utils.data import DataLoader, TensorDataset
me = os.environ["RANK"]
torch.manual_seed(0)
with shoal.init(timeout=60):
    model, data = torch.nn.Linear(8, 4), TensorDataset(torch.randn(96, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, 12, shuffle=True)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, loader, strategy="zero3", elastic=True
    )
    for _ in loader.epochs(3):
        for (x,) in loader:
            with optimizer.attempt():
                loss = model(x).square().mean()
                if {"0": 3, "2": 9}.get(me) == optimizer.num_committed:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    total = sum(value.sum() for value in model.state_dict().values()).item()
    print(f"on {shoal.world().size} after {optimizer.num_committed}: {total!r}")
"""


@pytest.mark.mpi
def test_over_another_mpi_nobody_can_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpiexec, "command", lambda ranks: (["mpiexec", "-n", str(ranks)], {}))
    config = LaunchConfig(SCRIPT, ranks=2, backend="mpi", elastic=Elastic())
    with pytest.raises(LaunchError, match="needs an Open MPI of version 5 or newer"):
        launch(config)


def test_a_function_does_not_run_elastically_over_mpi() -> None:
    with pytest.raises(LaunchError, match="shoal launch --elastic --backend mpi"):
        shoal.run(lambda: None, 2, "mpi", elastic=Elastic())


def test_ranks_that_mpiexec_did_not_start() -> None:
    """The script asks for MPI, and the launcher does not know."""
    environment = {**os.environ, "SHOAL_BACKEND": "mpi"}
    done = subprocess.run(
        [*LAUNCHER, "--elastic", "-n", "2", SCRIPT, "2", "2"], capture_output=True, text=True,
        timeout=DEADLINE_S, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode
    assert "if mpiexec has started them: start the run with shoal launch" in done.stderr


def test_losses_in_several_ways_and_restarts(tmp_path: Path) -> None:
    """An error, and a stop; the one in place of the first, whose rank it has, fails alike."""
    deeds = ("1@2=raise", "2@4=STOP", "3@5=raise")
    line = f"-n 3 --min 3 --restarts 3 --log-dir {tmp_path}"
    code, _, err = run(line, "8", "3", *deeds)
    assert code == 0, err
    error, stop = "ValueError: the loss is nan", "stopped (SIGSTOP), and killed for that"
    for number, fate in {1: error, 2: stop, 3: error}.items():
        pattern = rf"  worker {number} \(rank [12]\): {re.escape(fate)}; worker \d took its place"
        assert len(re.findall(pattern, err)) == 1, err
    logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(logs) == [f"worker-{number}.log" for number in range(6)]
    assert counted("".join(logs.values())) == ["0 3", "1 3", "2 3"]
    assert "the loss is nan" in logs["worker-1.log"]


def test_one_that_cannot_be_started_anew_is_no_reason_to_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(command: Any, **options: Any) -> Any:
        if options["env"]["SHOAL_PERSON"] == "1":
            raise OSError(errno.EAGAIN, "there are too many processes")
        return spawn(command, **options)

    monkeypatch.setattr("shoal.launch.script.rank.spawn", refuse)
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    assert launch(LaunchConfig(str(script), elastic=Elastic(restarts=1))) == 3
    assert "worker 1 cannot be started: " in capfd.readouterr().err


def test_workers_are_of_one_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    script.write_text("import os; print(os.environ['SHOAL_RUN_ID'])")
    assert launch(LaunchConfig(str(script), ranks=2, elastic=Elastic(spares=1))) == 0
    out, err = capfd.readouterr()
    assert len({line.split()[-1] for line in out.splitlines()}) == 1
    assert "the script never joined a world" in err


def test_too_few_are_the_end_and_the_code_is_that_of_the_last(tmp_path: Path) -> None:
    line = f"-n 3 --min 2 --log-dir {tmp_path}"
    code, _, err = run(line, "8", "3", "0@2=KILL", "2@4=raise")
    assert code == 1, err
    summary = err[err.index("shoal: the run could not go on") :]
    assert "it needs" not in summary
    assert "the run needs at least 2 rank(s) and has 1 left" in summary
    assert "worker 0 (rank 0): killed by SIGKILL; nobody took its place" in summary
    assert "ValueError: the loss is nan" in summary
    assert summary.count("Traceback") == 1  # not that of the one that was left


def test_a_sigterm_is_a_request_to_leave_and_nobody_is_lost() -> None:
    code, out, err = run("-n 2 --restarts 1", "6", "1", "0@3=TERM")
    assert code == 0, err
    assert counted(out) == ["0 1"]
    assert "worker 0 (rank 0) is gone: it left, as it had asked to" in err
    assert "lost" not in err


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all(background: Background, hold: Path, by: int) -> None:
    process = background("--elastic", "-n", "2", "--restarts", "2", SCRIPT, "9", "2", "0@2=wait")
    at_step(process, 1)
    process.send_signal(by)
    code, _, err = end_of(process)
    assert code == 128 + by
    assert err.endswith(f"shoal: stopped by {signal.Signals(by).name}.\n"), err


def test_the_end_of_the_launcher_is_the_end_of_all_and_joiners_say_why(
    background: Background, hold: Path
) -> None:
    process, joiner, pids = joined(background)
    process.kill()
    for pid in pids:
        assert_gone(pid)
    code, _, err = end_of(joiner)
    assert code == 1
    assert "shoal.errors.LaunchError: the run has ended: its holder is gone" in err
    assert "shoal: worker 2: LaunchError: the run has ended: its holder is gone" in err


def test_no_checkpoint_is_lost_with_the_launcher(background: Background, tmp_path: Path) -> None:
    """It is killed while ranks train and save; the newest checkpoint that they told of is whole."""
    script, folder = tmp_path / "saving.py", tmp_path / "saved"
    script.write_text(SAVING)
    process = background("--elastic", "-n", "2", "--min", "2", str(script), str(folder))
    assert process.stdout is not None
    told: list[tuple[int, int]] = []
    while len(told) < 6:
        line = process.stdout.readline()
        assert line, process.communicate(timeout=DEADLINE_S)
        if match := re.search(r"saved (\d+) by (\d+)", line):
            told.append((int(match[1]), int(match[2])))
    process.kill()
    for pid in {pid for _, pid in told}:
        assert_gone(pid)
    rest = process.stdout.read()
    steps = [step for step, _ in told] + [int(step) for step in re.findall(r"saved (\d+)", rest)]
    model = torch.nn.Linear(8, 4)
    loaded = shoal.load(folder, model)
    assert loaded.step >= max(steps)
    assert (model.bias == loaded.step).all()


SAVING = """
import os, sys, torch, shoal
with shoal.init(timeout=60):
    model = torch.nn.Linear(8, 4)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = shoal.as_distributed(model, optimizer, strategy="zero3", elastic=True)
    while True:
        with optimizer.attempt():
            (-model(torch.zeros(1, 8)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.attempt():
            step = optimizer.num_committed
            shoal.save(sys.argv[1], model, optimizer, step=step, keep=2, wait=True)
        print(f"saved {step} by {os.getpid()}", flush=True)
"""


def test_one_from_another_terminal_joins_is_killed_and_named(
    background: Background, hold: Path
) -> None:
    process, joiner, _ = joined(background)
    ((_, pid),) = at_step(joiner, 1).values()
    os.kill(pid, signal.SIGKILL)
    assert_gone(pid)
    hold.unlink()
    assert end_of(joiner)[0] == 128 + signal.SIGKILL
    code, out, err = end_of(process)
    assert code == 0, err
    assert counted(out) == ["0 2", "1 2"]
    assert "generation 2, 3 rank(s): worker 2 joins as rank 2" in err
    assert "worker 2 (rank 2): killed by SIGKILL; nobody took its place" in err


def test_the_end_of_its_launcher_is_the_end_of_a_joiner(background: Background, hold: Path) -> None:
    process, joiner, _ = joined(background)
    ((_, pid),) = at_step(joiner, 1).values()
    joiner.kill()
    assert_gone(pid)
    hold.unlink()
    code, out, err = end_of(process)
    assert code == 0, err
    assert counted(out) == ["0 2", "1 2"]
    assert "worker 2 (rank 2): its connection to the run's holder ended" in err


def test_one_for_whom_there_was_no_room_is_told_so_at_the_end(
    background: Background, hold: Path
) -> None:
    process = background("--elastic", "-n", "1", "--max", "1", SCRIPT, "5", "1", "0@2=wait")
    address = invitation(process)
    at_step(process, 1)
    joiner = background("--join", address, SCRIPT, "5", "1")
    assert joiner.stdout is not None
    assert "waits to be a member" in joiner.stdout.readline()
    hold.unlink()
    code, out, err = end_of(process)
    assert (code, counted(out), err) == (0, ["0 1"], "")
    said = "shoal: worker 1 was not needed: the run has come to its end.\n"
    assert end_of(joiner) == (0, "", said)


def joined(background: Background) -> tuple[Any, Any, list[int]]:
    """A run of two that wait, one that has joined them, and the pids of the two."""
    deeds = ("0@2=wait", "1@2=wait", "0@3=wait", "1@3=wait", "2@3=wait")
    process = background("--elastic", "-n", "2", SCRIPT, "5", "2", *deeds)
    address = invitation(process)
    pids = [pid for _, pid in at_step(process, 2).values()]
    joiner = background("--join", address, SCRIPT, "5", "2", *deeds)
    at_step(process, 2)
    return process, joiner, pids


def invitation(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    found = re.search(r"shoal launch --join (\S+) ", process.stderr.readline())
    assert found is not None
    return found[1]


def test_one_that_is_slow_is_named_and_stays(
    background: Background, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "1")
    process = background("--elastic", "-n", "3", SCRIPT, "0", "3")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    said = next(line for line in lines if "holds the others up" in line)
    assert said.startswith("shoal: worker 1 (rank 1) holds the others up: it waits ")
    hold.unlink()
    code, out, _ = end_of(process)
    assert (code, counted(out)) == (0, ["0 3", "1 3", "2 3"])


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def words(*arguments: str, launcher: Sequence[str] = LAUNCHER, **options: Any) -> str:
        done = subprocess.run(
            [*launcher, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            **options,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    return words


# Becomes another user once all is imported, which that one may not read.
STRANGER = """
import os, sys
from shoal.errors import LaunchError
from shoal.launch.script.launcher import LaunchConfig, launch
os.chdir("/")
os.setresgid(*3 * [65534])
os.setresuid(*3 * [65534])
try:
    launch(LaunchConfig("/dev/null", join=sys.argv[2]))
except LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@contextmanager
def held(background: Background, *options: str) -> Iterator[str]:
    """An elastic run under way, by the address to join it."""
    yield invitation(background("--elastic", *options, "-n", "1", SCRIPT, "3", "9"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="to play another user one must be root")
def test_another_user_cannot_join(background: Background, refused: Callable[..., str]) -> None:
    with held(background) as address:
        said = refused("--join", address, launcher=[sys.executable, "-c", STRANGER])
    assert f"There is no elastic run of yours at {address}" in said


def test_who_has_another_secret_cannot_join(
    background: Background, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "the secret")
    name = os.uname().nodename
    with held(background, "--master", f"{name}:29873") as address:
        assert address == f"{name}:29873"
        for wrong in ("another", ""):
            said = refused("--join", address, SCRIPT, env={**os.environ, "SHOAL_TOKEN": wrong})
            assert "SHOAL_TOKEN" in said


def test_two_elastic_runs_of_a_host_have_two_ports(
    background: Background, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(background, "--master", "localhost:29877"):
        said = refused("--elastic", "--master", "localhost:29877", SCRIPT)
        assert "Another elastic run of this host has port 29877" in said
        ports = iter([29877, 29878])
        place = "shoal.launch.script.meeting_place.free_port"
        monkeypatch.setattr(place, lambda: ("127.0.0.1", next(ports)))
        with MeetingPlace(LaunchConfig("x.py", elastic=Elastic())) as found:
            assert found.master_port == 29878


def test_other_hosts_are_not_let_in_without_a_secret(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    said = refused("--elastic", "--master", "10.0.0.1:29874", SCRIPT)
    assert "SHOAL_TOKEN" in said


def test_a_run_that_is_not_there_or_not_elastic_cannot_be_joined(
    refused: Callable[..., str],
) -> None:
    said = refused("--join", "localhost:29875", SCRIPT)
    assert "There is no elastic run of yours at localhost:29875" in said
    with MeetingServer.on_one_host(elastic_address("localhost", 29876)):
        said = refused("--join", "127.0.0.1:29876", SCRIPT)
    assert "The run at 127.0.0.1:29876 does not let ranks join: it is not elastic" in said

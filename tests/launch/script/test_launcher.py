"""The launcher: what ranks are given, how they end, and that nothing outlives them."""

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.conftest import LAUNCHER
from launch.watching import DEADLINE_SECONDS, SLEEPER, assert_gone, words_of
from shoal.errors import LaunchError
from shoal.launch.joining.environment import RankInfo, discover
from shoal.launch.script.launcher import LaunchConfig, launch

Write = Callable[[str], str]
Background = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def ranks_may_end_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank that has printed its traceback may take seconds to end."""
    for name in (
        "held.MOMENT_SECONDS",
        "node_launch.MOMENT_SECONDS",
        "node_launch.LONGEST_SECONDS",
    ):
        monkeypatch.setattr(f"shoal.launch.script.{name}", 60.0)


def test_each_rank_is_told_who_it_is(script: Write, tmp_path: Path) -> None:
    path = script("open(sys.argv[1] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))")
    assert launch(LaunchConfig(path, (f"{tmp_path}/env-",), ranks=3, backend="gloo")) == 0
    envs = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    for rank, env in enumerate(envs):
        port = int(env["MASTER_PORT"])
        assert discover(env) == RankInfo(rank, 3, rank, 3, 0, "127.0.0.1", port, "shoal")
        assert env["SHOAL_BACKEND"] == "gloo"
        assert env["SHOAL_RUN_ID"] == env["TORCHELASTIC_RUN_ID"] == envs[0]["SHOAL_RUN_ID"]
        assert env["SHOAL_MEETING"] == envs[0]["SHOAL_MEETING"]
        assert env["SHOAL_MEETING"].startswith("unix:")
        assert "SHOAL_TOKEN" not in env  # the secret comes over the socket
        assert int(env["OMP_NUM_THREADS"]) >= 1
    assert not Path(envs[0]["SHOAL_ERROR_DIR"]).exists()


def test_two_launches_share_neither_run_id_nor_meeting_place(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("print(os.environ['SHOAL_RUN_ID'], os.environ['SHOAL_MEETING'])")
    launch(LaunchConfig(path))
    launch(LaunchConfig(path))
    first, second = capfd.readouterr().out.splitlines()
    assert not set(first.split()[2:]) & set(second.split()[2:])


def test_what_the_user_exported_about_threads_is_kept(
    script: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch(LaunchConfig(script("print(os.environ['OMP_NUM_THREADS'])")))
    assert capfd.readouterr().out == "[rank 0] 7\n"


def test_a_launch_in_a_worker_of_an_elastic_run_is_a_launch_of_its_own(
    script: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PERSON", "7")
    path = script(
        "from shoal.launch.joining.environment import own_number\n"
        "from shoal.launch.joining.process_membership import is_elastic\n"
        "print(own_number(), is_elastic())"
    )
    assert launch(LaunchConfig(path)) == 0
    assert capfd.readouterr().out == "[rank 0] 0 False\n"


def test_ranks_of_a_second_node(script: Write, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(
        "print(*(os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK',"
        " 'MASTER_ADDR', 'MASTER_PORT', 'SHOAL_MEETING')))\n"
    )
    config = LaunchConfig(path, ranks=2, nodes=2, node_rank=1, master="10.9.8.7:4321", grace=0)
    assert launch(config) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[rank 2] 2 4 0 1 10.9.8.7 4322 tcp:10.9.8.7:4321",
        "[rank 3] 3 4 1 1 10.9.8.7 4322 tcp:10.9.8.7:4321",
    ]


def test_streams_stay_apart_and_lines_are_named(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    assert launch(LaunchConfig(path, ranks=2)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(err.splitlines()[:2]) == ["[rank 0] err", "[rank 1] err"]


def test_log_files_instead_of_the_screen(
    script: Write, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = script("print('out'); print('err', file=sys.stderr); sys.exit('bad end')")
    logs = tmp_path / "a" / "logs"
    assert launch(LaunchConfig(path, ranks=2, log_dir=logs)) == 1
    for rank in range(2):
        assert (logs / f"rank-{rank}.log").read_text() == "out\nerr\nbad end\n"
    out, err = capfd.readouterr()
    assert out == ""
    assert str(logs) in err.splitlines()[0]
    assert "bad end" in err


def test_no_umask_keeps_the_launcher_from_its_own_files(
    script: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "from shoal.launch.joining.exits import leave_record\n"
        "leave_record(ValueError('boom'))\n"
        "folder = os.environ['SHOAL_ERROR_DIR']\n"
        "for each in (folder, folder + '/rank-0.json'): print(oct(os.stat(each).st_mode))\n"
    )
    before = os.umask(0o777)
    try:
        assert launch(LaunchConfig(path, log_dir=tmp_path / "a" / "logs")) == 0
    finally:
        os.umask(before)
    log = tmp_path / "a" / "logs" / "rank-0.log"
    assert log.read_text() == "0o40700\n0o100600\n"
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (log, log.parent, log.parents[1])]
    assert modes == [0o600, 0o700, 0o700]


def test_a_module_is_started_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert launch(LaunchConfig("pack.tool", ("-m", "x y"), module=True)) == 0
    assert capfd.readouterr().out == "[rank 0] __main__ ['-m', 'x y']\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise ValueError('boom')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11),
    ],
)
def test_the_exit_code_is_the_ranks(script: Write, body: str, code: int) -> None:
    assert (
        launch(
            LaunchConfig(script(f"if os.environ['RANK'] == '1':\n    {body or 'pass'}"), ranks=2)
        )
        == code
    )


FAILS_SECOND = """
rank, folder = int(os.environ['RANK']), os.environ['SHOAL_ERROR_DIR']
def leave_record(primary, when, name):
    record = dict(rank=rank, time=when, type=name, message='m', primary=primary,
                  traceback=f'Traceback of {name} on rank {rank}')
    open(f'{folder}/rank-{rank}.json', 'w').write(json.dumps(record))
if rank == 2:   # failed first, is gone last
    leave_record(True, 1.0, 'ValueError')
    while not os.path.exists(f'{folder}/go'): time.sleep(0.01)
    sys.exit(3)
leave_record(False, 0.5, 'PeerError')   # an echo, whatever its clock says
if rank == 1: open(f'{folder}/go', 'w').close()
sys.exit(1)
"""


def test_the_summary_names_the_rank_that_failed_first(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(LaunchConfig(script(FAILS_SECOND), ranks=3)) == 3
    err = capfd.readouterr().err
    assert "rank 2 failed first (exit code 3)" in err
    assert "Traceback of ValueError on rank 2" in err
    assert "ranks 0, 1: PeerError, exit code 1" in err
    assert err.count("failed first") == 1


LEAVES_EARLY = """
import shoal, torch
world = shoal.init("shm")
world.barrier()
if world.rank == 1:
    {how}
world.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_leaves_with_0_is_named_before_those_that_wait_for_it(
    script: Write, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    path = script(LEAVES_EARLY.format(how=how))
    assert launch(LaunchConfig(path, ranks=2)) == 1
    summary = capfd.readouterr().err.rpartition("shoal: ")[2]
    assert summary.startswith("rank 1 left first, with exit code 0, while others waited for it")
    assert "rank 0 waited in all_reduce(float32[1], op=sum)" in summary
    assert "rank 0: PeerError, exit code 1" in summary
    if how.startswith("sys."):
        assert f"rank 1 failed: it has left by {how} at {path}:" in summary


def test_a_rank_that_exits_with_a_code_says_where(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(LEAVES_EARLY.format(how="sys.exit(3)"))
    assert launch(LaunchConfig(path, ranks=2)) == 3
    summary = capfd.readouterr().err.rpartition("shoal: ")[2]
    assert summary.startswith("rank 1 failed first (exit code 3)")
    assert "    sys.exit(3)\n  SystemExit: 3\n" in summary
    assert "rank 0: PeerError, exit code 1" in summary


def test_the_summary_has_the_traceback_of_a_script_that_knows_nothing_of_shoal(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("def deep():\n    raise ValueError('boom')\ndeep()")
    assert launch(LaunchConfig(path)) == 1
    summary = capfd.readouterr().err.partition("shoal: ")[2]
    assert summary.startswith("rank 0 failed first (exit code 1)")
    assert "Traceback (most recent call last)" in summary
    assert "in deep" in summary
    assert "ValueError: boom" in summary


def test_tracebacks_of_all_ranks_are_told_once(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("print('before', file=sys.stderr)\nraise ValueError('boom')")
    assert launch(LaunchConfig(path, ranks=4)) == 1
    err = capfd.readouterr().err
    assert err.count("ValueError: boom") == 1
    assert err.count("before") == 4
    assert "exit code 1, with the same traceback" in err


def test_a_traceback_that_was_only_logged_reaches_the_screen(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "import traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "print('goes on', file=sys.stderr)\n"
    )
    assert launch(LaunchConfig(path, ranks=1)) == 0
    err = capfd.readouterr().err
    assert "[rank 0] ZeroDivisionError: division by zero\n[rank 0] goes on\n" in err


def test_what_follows_a_traceback_is_not_lost(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "import atexit\n"
        "atexit.register(lambda: print('last words', file=sys.stderr))\n"
        "record = dict(time=1.0, type='ValueError', message='', traceback='?', primary=True)\n"
        "open(os.environ['SHOAL_ERROR_DIR'] + '/rank-0.json', 'w').write(json.dumps(record))\n"
        "raise ValueError('boom')"
    )
    assert launch(LaunchConfig(path)) == 1
    assert "[rank 0] last words" in capfd.readouterr().err


def test_a_script_that_never_joined_is_told_so(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(LaunchConfig(script("pass"), ranks=2)) == 0
    assert "the script never joined a world: each of the 2 processes" in capfd.readouterr().err
    assert launch(LaunchConfig(script("pass"))) == 0
    joins = "open(os.environ['SHOAL_ERROR_DIR'] + '/joined-' + os.environ['RANK'], 'w')"
    assert launch(LaunchConfig(script(joins), ranks=2)) == 0
    assert capfd.readouterr().err == ""


def test_a_record_that_is_cut_short_is_passed_over(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("open(os.environ['SHOAL_ERROR_DIR'] + '/rank-0.json', 'w').write('{\"ti')\n1 / 0")
    assert launch(LaunchConfig(path)) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err.partition("shoal: ")[2]


def test_survivors_are_ended_with_all_they_started(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.script.node_launch._TERM_SECONDS", 0.2)
    path = script(
        "pids = sys.argv[1]\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists(pids): time.sleep(0.01)\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(pids + '~', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(pids + '~', pids)\n"
        "time.sleep(1000)\n"
    )
    pids = tmp_path / "pids"
    assert launch(LaunchConfig(path, (str(pids),), ranks=2, grace=0.1)) == 5
    for pid in pids.read_text().split():
        assert_gone(int(pid))


def test_survivors_have_time_to_end_by_themselves(
    script: Write, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = script(
        "rank, pid = os.environ['RANK'], sys.argv[1]\n"
        "if rank == '0':\n"
        "    open(pid + '~', 'w').write(str(os.getpid()))\n"
        "    os.rename(pid + '~', pid)\n"
        "    sys.exit(5)\n"
        "while not os.path.exists(pid): time.sleep(0.01)\n"
        "while os.path.exists('/proc/' + open(pid).read()): time.sleep(0.01)\n"
        "print('said goodbye')\n"
    )
    assert launch(LaunchConfig(path, (str(tmp_path / "pid"),), ranks=2)) == 5
    assert "[rank 1] said goodbye" in capfd.readouterr().out


def test_a_stopped_rank_is_killed_without_grace_and_named(
    script: Write, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = script(
        "rank, pid = os.environ['RANK'], sys.argv[1]\n"
        "if rank == '0':\n"
        "    open(pid + '~', 'w').write(str(os.getpid()))\n"
        "    os.rename(pid + '~', pid)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not os.path.exists(pid): time.sleep(0.01)\n"
        "stat = '/proc/' + open(pid).read() + '/stat'\n"
        "while ') T' not in open(stat).read(): time.sleep(0.01)\n"
        "echo = dict(time=1.0, type='PeerError', message='', traceback='', primary=False)\n"
        "open(os.environ['SHOAL_ERROR_DIR'] + '/rank-1.json', 'w').write(json.dumps(echo))\n"
        "sys.exit(5)\n"
    )
    assert launch(LaunchConfig(path, (str(tmp_path / "pid"),), ranks=2, grace=1000)) == 137
    assert "rank 0 failed first (stopped (SIGSTOP)" in capfd.readouterr().err


def test_what_a_rank_leaves_behind_is_ended(script: Write, tmp_path: Path) -> None:
    path = script(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))"
    )
    assert launch(LaunchConfig(path, (str(tmp_path / "pid"),))) == 0
    assert_gone(int((tmp_path / "pid").read_text()))


def test_nothing_outlives_a_launcher_that_is_killed(script: Write, background: Background) -> None:
    process = background("-n", "2", script(SLEEPER))
    lines = words_of(process, 2)
    process.kill()
    process.wait()
    for _, rank, child, _ in lines:
        assert_gone(int(rank))
        assert_gone(int(child))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while os.path.exists(lines[0][3]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Waits for signals that are blocked: one that came just before `pause` would leave it waiting.
LISTENER = """
signals = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print('up')
while True: print('got', signal.Signals(signal.sigwait(signals)).name.removeprefix('SIG'))
"""


def test_signals_are_forwarded(script: Write, background: Background) -> None:
    process = background("-n", "2", script(LISTENER))
    assert words_of(process, 2) == [["up"]] * 2
    # Under nohup this process ignores SIGHUP, and with it those that it starts.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for signum in (signal.SIGUSR1, signal.SIGUSR2, *(() if is_ignored else (signal.SIGHUP,))):
        process.send_signal(signum)
        assert words_of(process, 2) == [["got", signum.name.removeprefix("SIG")]] * 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_after_a_stop_is_the_signals(
    script: Write, background: Background, signum: signal.Signals
) -> None:
    process = background("-n", "2", script(SLEEPER))
    lines = words_of(process, 2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signum
    assert err == f"shoal: stopped by {signum.name}.\n"
    assert "failed first" not in err
    for _, rank, child, _ in lines:
        assert_gone(int(rank))
        assert_gone(int(child))


def test_after_an_interrupt_there_is_one_line_however_long_ranks_take_to_end(
    script: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "held.MOMENT_SECONDS",
        "node_launch.MOMENT_SECONDS",
        "node_launch.LONGEST_SECONDS",
    ):
        monkeypatch.setattr(f"shoal.launch.script.{name}", 0.05)
    path = script(
        "import atexit; atexit.register(time.sleep, 1)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(30)"
    )
    assert launch(LaunchConfig(path)) == 128 + signal.SIGINT
    assert capfd.readouterr().err == "shoal: stopped by SIGINT.\n"


def test_a_second_interrupt_kills_at_once(script: Write, background: Background) -> None:
    path = script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, lambda *_: print('not yet'))\n"
        "print('up')\nwhile True: signal.pause()\n"
    )
    process = background("-n", "1", "--grace", "1000", path)
    assert words_of(process, 1) == [["up"]]
    process.send_signal(signal.SIGINT)
    assert words_of(process, 1) == [["not", "yet"]]
    process.send_signal(signal.SIGINT)
    process.wait(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o400])
def test_permissions_of_the_script_are_not_touched(script: Write, mode: int) -> None:
    """P31: a launcher that makes files executable."""
    path = script("pass")
    os.chmod(path, mode)
    before = os.stat(path)
    assert launch(LaunchConfig(path)) == 0
    after = os.stat(path)
    assert stat.S_IMODE(after.st_mode) == mode
    assert (after.st_ctime_ns, after.st_mtime_ns) == (before.st_ctime_ns, before.st_mtime_ns)


def test_a_busy_port_is_refused_before_any_rank_starts(script: Write, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = script("open(sys.argv[1], 'w')")
        config = LaunchConfig(path, (f"{tmp_path}/ran",), master=f"localhost:{port}")
        with pytest.raises(LaunchError, match=rf"Port {port} must be free.*--master"):
            launch(config)
    assert not (tmp_path / "ran").exists()


def test_one_node_listens_on_no_port(script: Write, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(
        "rows = [line.split() for name in ('tcp', 'tcp6')"
        " for line in open(f'/proc/net/{name}').readlines()[1:]]\n"
        "listening = {row[9] for row in rows if row[3] == '0A'}\n"
        "folder = f'/proc/{os.getppid()}/fd/'\n"
        "opened = [os.readlink(folder + fd) for fd in os.listdir(folder) if int(fd) > 2]\n"
        "print(sum(name == f'socket:[{inode}]' for name in opened for inode in listening))"
    )
    assert launch(LaunchConfig(path)) == 0
    assert capfd.readouterr().out == "[rank 0] 0\n"


def test_a_closed_standard_input_is_no_ranks_business(script: Write, tmp_path: Path) -> None:
    """The first socket to be opened became descriptor 0, and ranks waited for the whole timeout."""
    path = script(
        "import shoal\n"
        "with shoal.init('shm', timeout=50) as world:\n"
        "    open(sys.argv[1] + str(world.rank), 'w').write(str(world.size))\n"
    )
    command = [*LAUNCHER, "-n", "2", path, f"{tmp_path}/met-"]
    shell = " ".join(f"'{word}'" for word in command) + " <&-"
    assert subprocess.run(["/bin/sh", "-c", shell], check=False, timeout=150).returncode == 0
    assert [(tmp_path / f"met-{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_a_log_folder_that_is_a_file_is_refused(script: Write, tmp_path: Path) -> None:
    path = script("pass")
    with pytest.raises(LaunchError, match="--log-dir must be a folder"):
        launch(LaunchConfig(path, log_dir=Path(path)))

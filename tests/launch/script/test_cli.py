"""The command line: what is the launcher's, what is the script's, and how errors look."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.cli import main
from shoal.launch.script.launcher import LaunchConfig, launch
from shoal.meeting.elastic_options import Elastic


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """Collects what would be launched, and launches nothing."""
    configs: list[LaunchConfig] = []

    def collect(config: LaunchConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("shoal.launch.script.launcher.launch", collect)
    return configs


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_options_reach_the_launcher(launched: list[LaunchConfig]) -> None:
    line = (
        "launch -n 4 --backend gloo --nodes 2 --node-rank 1 --master a:5 --log-dir d --grace 2 "
        "s.py x"
    )
    assert run(*line.split()) == 0
    assert launched == [
        LaunchConfig(
            "s.py",
            ("x",),
            ranks=4,
            backend="gloo",
            nodes=2,
            node_rank=1,
            master="a:5",
            log_dir=Path("d"),
            grace=2.0,
        )
    ]


@pytest.mark.parametrize("option", ["-n", "--ranks", "--nproc-per-node"])
def test_names_for_the_number_of_ranks(launched: list[LaunchConfig], option: str) -> None:
    run("launch", option, "3", "s.py")
    assert launched[0].ranks == 3


@pytest.mark.parametrize("option", ["--nodes", "--nnodes"])
def test_names_for_the_number_of_nodes(launched: list[LaunchConfig], option: str) -> None:
    run("launch", option, "2", "--master", "a:5", "s.py")
    assert launched[0].nodes == 2


def test_options_of_elastic_runs(launched: list[LaunchConfig]) -> None:
    line = "launch --elastic --min 2 --max 8 --spares 1 --restarts 3 s.py"
    assert run(*line.split()) == 0
    bounds = Elastic(min_ranks=2, max_ranks=8, spares=1, restarts=3)
    assert launched == [LaunchConfig("s.py", ranks=2, elastic=bounds)]
    run("launch", "-n", "3", "--elastic", "s.py")
    assert launched[1] == LaunchConfig("s.py", ranks=3, elastic=Elastic())
    run("launch", "--join", "localhost:4", "s.py", "x")
    assert launched[2] == LaunchConfig("s.py", ("x",), join="localhost:4")


def test_a_module(launched: list[LaunchConfig]) -> None:
    run("launch", "-m", "-n", "2", "pack.mod", "-m", "-n")
    assert launched == [LaunchConfig("pack.mod", ("-m", "-n"), ranks=2, module=True)]


AWKWARD = ["", " ", "-n", "-n=2", "--help", "--", "-", "--version", "a b", '"q"', "'", "$HOME", "*"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(AWKWARD) | st.text(st.characters(exclude_characters="\0")), max_size=6)
)
def test_all_that_follows_the_script_is_the_scripts(
    launched: list[LaunchConfig], arguments: list[str]
) -> None:
    """P31: arguments split on spaces, or taken for the launcher's own."""
    launched.clear()
    assert run("launch", "-n", "2", "s.py", *arguments) == 0
    assert launched[0].args == tuple(arguments)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(AWKWARD)
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
        max_size=6,
    )
)
def test_arguments_arrive_exactly(tmp_path: Path, arguments: list[str]) -> None:
    """P31: through the processes, not only through the parser."""
    script = tmp_path / "with a space.py"
    script.write_text(
        f"import sys; open({str(tmp_path / 'out')!r}, 'w').write(ascii(sys.argv[1:]))"
    )
    assert launch(LaunchConfig(str(script), tuple(arguments))) == 0
    assert ast.literal_eval((tmp_path / "out").read_text()) == arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "s.py"], "At least one rank"),
        (["no such script.py"], "The script must exist"),
        (["--nodes", "2", "s.py"], "no master was given"),
    ],
)
def test_an_error_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run("launch", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("shoal ")


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from shoal.cli import main\n"
        "try: main(['launch', '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[-1] == "False"


def test_the_exit_code_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.script.launcher.launch", lambda config: 137)
    assert run("launch", "s.py") == 137


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_launch_without_streams_runs(tmp_path: Path, closed: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\n"
        f"open({str(tmp_path / 'done')!r}, 'w')\nsys.exit(5)"
    )
    assert shell(f"launch {path} {closed}").returncode == 5
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_is_lost_is_said_in_one_line(
    tmp_path: Path, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    path = tmp_path / "script.py"
    path.write_text("for line in range(9): print(line, flush=True)")
    done = shell(f"launch {path} > /dev/full")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert "output is lost from here on (No space left on device)" in done.stderr
    done = shell("--version > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "shoal: the output cannot be written: No space left on device.\n"


def test_a_deleted_directory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "gone").mkdir()
    done = shell(
        f"launch {tmp_path}/script.py", f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec"
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "cd to one that exists" in done.stderr


def shell(arguments: str, before: str = "exec") -> subprocess.CompletedProcess[str]:
    """`shoal` from a shell, with its redirections."""
    command = f"{before} {sys.executable} -m shoal {arguments}"
    return subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=150, check=False
    )

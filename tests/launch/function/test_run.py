"""Functions on several processes: what can be sent, what comes back, and how failures end."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch

import leaks
import shoal
from launch import worker
from shoal.errors import LaunchError, RemoteError
from shoal.launch.function import call as calls
from shoal.launch.function import outcome as outcomes_of_ranks
from shoal.launch.function.forkserver.forkserver import ForkServer, fork_server
from shoal.launch.function.outcome import Outcome
from shoal.launch.function.run import run_processes

SOURCE = str(Path(shoal.__file__).resolve().parents[1])
ENTRIES = """
def lingering(channel, payload):
    main(channel, payload)
    signal.pause()

def silent(channel, payload):
    channel.close()
    signal.pause()

def babbling(channel, payload):
    channel.sendall(b"what is this, and who wrote it?")
"""


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points that children can import; the server itself may stay after the test."""
    (tmp_path / "worker_of_test.py").write_text(worker.SOURCE + ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server()
    leaks.baseline()


def run(fn: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> list[Outcome]:
    """Runs `fn` with RANK set, on the entry point of these tests."""
    options = {
        "entry": "worker_of_test:main",
        "env_for": lambda rank: {"RANK": str(rank)},
        **options,
    }
    return run_processes(fn, args, ranks, **options)


def values(outcomes: list[Outcome]) -> list[Any]:
    """The results of a run in which nothing failed."""
    assert [outcome.traceback for outcome in outcomes] == [""] * len(outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0] * len(outcomes)
    assert not any(outcome.failed for outcome in outcomes)
    return [outcome.value for outcome in outcomes]


def rank() -> int:
    """The rank that this process is."""
    return int(os.environ["RANK"])


def fail_on(failing: int, error: BaseException) -> int:
    """Raises on one rank."""
    if rank() == failing:
        raise error
    return rank()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A named pipe: opening it waits for the other side."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


class TestFunctions:
    def test_results_come_in_order_of_rank(self) -> None:
        assert values(run(rank, ranks=4)) == [0, 1, 2, 3]

    def test_closures_and_lambdas(self) -> None:
        offset = 10
        assert values(run(lambda x: x + offset + rank(), 5)) == [15, 16]

    def test_notebook_like_functions(self) -> None:
        cell = """
import os
scale = 3
class Box:
    def __init__(self, value): self.value = value
def helper(x): return Box(x * scale)
def fn(x): return helper(x)
"""
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(cell, namespace)
        for result in values(run(namespace["fn"], 2)):
            assert type(result) is namespace["Box"]
            assert result.value == 6

    @pytest.fixture
    def unimportable(self, tmp_path: Path) -> Iterator[ModuleType]:
        """A module loaded from a path that no child searches, as test runners do."""
        path = tmp_path / "elsewhere" / "tests_of_somebody.py"
        path.parent.mkdir()
        path.write_text(
            "class Broken(Exception): pass\n"
            "def helper(x): return x + 1\n"
            "def fn(x): return helper(x)\n"
            "def broken(): raise Broken('it is')\n"
        )
        name = "somewhere.tests_of_somebody"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        del sys.modules[name]

    def test_module_that_children_cannot_import(self, unimportable: ModuleType) -> None:
        assert values(run(unimportable.fn, 1)) == [2, 2]
        errors = [outcome.error for outcome in run(unimportable.broken)]
        assert [type(error) for error in errors] == [unimportable.Broken] * 2
        assert cloudpickle.list_registry_pickle_by_value() == set()

    def test_users_registry_is_kept(self, unimportable: ModuleType) -> None:
        cloudpickle.register_pickle_by_value(unimportable)
        try:
            assert values(run(unimportable.fn, 1)) == [2, 2]
            assert cloudpickle.list_registry_pickle_by_value() == {unimportable.__name__}
        finally:
            cloudpickle.unregister_pickle_by_value(unimportable)

    def test_installed_modules_go_by_reference(self) -> None:
        from shoal.launch.function.call import encode_call

        assert len(encode_call(textwrap_dedent(), ())) < 200

    def test_script(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path)])}
        done = subprocess.run(
            [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "run\n[6, 6]\ncaught: because\n"


SCRIPT = """
from shoal.launch.function.run import run_processes
print("run")  # once: children do not run the script again

class Mine(Exception):
    pass

base = 4
def helper(x):
    return base + x
def fn(x):
    return helper(x)
def fails():
    raise Mine("because")

def run(fn, *args):
    return run_processes(fn, args, 2, entry="worker_of_test:main", env_for=lambda rank: {})

print([outcome.value for outcome in run(fn, 2)])
try:
    raise run(fails)[1].error
except Mine as error:
    print("caught:", error)
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ForkServer]:
    """The servers that are asked to load torch's compiler."""
    servers: list[ForkServer] = []
    monkeypatch.setattr(ForkServer, "load_compiler", lambda server: servers.append(server))
    monkeypatch.setattr(calls, "COMPILER", "no_such_module")  # this process may have it
    return servers


def say_whether_there_is(module: str) -> None:
    """At the end of this rank, in place of the compiler."""
    outcomes_of_ranks.COMPILER = module


def name_an_optimizer() -> None:
    """As a function does that makes one."""


def test_compiler_is_loaded_once_a_rank_has_used_it(asked: list[ForkServer]) -> None:
    run(say_whether_there_is, "no_such_module")
    assert asked == []
    run(say_whether_there_is, "sys")
    assert asked == [fork_server()]


def test_compiler_is_loaded_where_an_optimizer_is_named(asked: list[ForkServer]) -> None:
    run(name_an_optimizer)
    assert asked[0] is fork_server()


def test_compiler_is_loaded_if_the_caller_has_it(
    asked: list[ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "COMPILER", "sys")
    run(rank)
    assert asked[0] is fork_server()


def textwrap_dedent() -> Callable[..., Any]:
    """A function of the standard library."""
    import textwrap

    return textwrap.dedent


def modules_of_first_use() -> list[str]:
    before = set(sys.modules)
    shoal.world().all_reduce(torch.ones(1))
    return [name for name in sys.modules if name.startswith("shoal.") and name not in before]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_no_rank_has_to_import_shoal(backend: str) -> None:
    assert shoal.run(modules_of_first_use, 2, backend) == [[], []]


class TestSurroundings:
    def test_environment_adds_to_the_callers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOAL_TEST_NOW", "yes")
        names = ("SHOAL_TEST_NOW", "RANK")
        found = values(run(lambda: [os.environ.get(name) for name in names]))
        assert found == [["yes", "0"], ["yes", "1"]]

    def test_output_goes_to_the_callers(self, capfd: pytest.CaptureFixture[str]) -> None:
        values(run(lambda: print(f"rank {rank()}")))
        assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0", "rank 1"]

    def test_large_arguments_and_results(self) -> None:
        blob = bytes(32 << 20)

        def fn(data: bytes) -> bytes:
            return data if rank() else bytes(200_000_000)

        assert [len(value) for value in values(run(fn, blob))] == [200_000_000, len(blob)]

    def test_threads_may_run_at_once(self) -> None:
        found: dict[int, list[Any]] = {}

        def work(number: int) -> None:
            found[number] = values(run(lambda: (number, rank())))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == {number: [(number, 0), (number, 1)] for number in range(3)}

    def test_rank_may_run_ranks_of_its_own(self) -> None:
        def outer() -> list[Any]:
            options = {"entry": "worker_of_test:main", "env_for": lambda rank: {"RANK": str(rank)}}
            inner = run_processes(lambda: os.environ["RANK"], (), 2, **options)
            return [outcome.value for outcome in inner]

        assert values(run(outer, ranks=1)) == [["0", "1"]]

    def test_nothing_leaks_over_many_runs(self) -> None:
        def count() -> list[int]:
            pids = os.getpid(), fork_server().pid
            return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

        values(run(rank))
        before = count()
        for number in range(50):
            outcomes = run(fail_on, number % 3, ValueError("no"))
            assert [outcome.failed for outcome in outcomes] == [number % 3 == 0, number % 3 == 1]
        # The server tells of an end before it closes the last pipe, hence its small slack.
        after = count()
        assert after[0] == before[0]
        assert after[1] <= before[1] + 2


class Stubborn(Exception):
    """Pickles, but cannot be rebuilt: its constructor wants more than it passes on."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Speechless(Locked):
    """Has no text either."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class TestErrors:
    def test_exception_comes_with_its_traceback_and_time(self) -> None:
        start = time.monotonic()
        good, bad = run(fail_on, 1, KeyError("gone"))
        assert (good.value, good.failed, good.exit_code) == (0, False, 0)
        assert isinstance(bad.error, KeyError)
        assert bad.error.args == ("gone",)
        assert "in fail_on" in bad.traceback
        assert "KeyError: 'gone'" in bad.traceback
        assert bad.exit_code == 1
        assert bad.failed_at is not None
        assert start < bad.failed_at < time.monotonic()

    @pytest.mark.parametrize(
        ("make", "name", "message"),
        [
            (lambda: Stubborn(3, "x"), "Stubborn", "3: x"),
            (Locked, "Locked", "holds a lock"),
            (Speechless, "Speechless", "RuntimeError in __str__"),
        ],
    )
    def test_stand_in_for_what_cannot_be_rebuilt(
        self, make: Callable[[], Exception], name: str, message: str
    ) -> None:
        def fn() -> None:
            raise make()

        (outcome,) = run(fn, ranks=1)
        assert isinstance(outcome.error, RemoteError)
        assert outcome.error.type_name.endswith(name)
        assert message in outcome.error.message
        assert name in outcome.traceback

    def test_result_that_cannot_be_pickled(self) -> None:
        (outcome,) = run(threading.Lock, ranks=1)
        assert isinstance(outcome.error, TypeError)
        assert "what the function returned (a lock) cannot be sent back" in str(outcome.error)

    def test_result_that_cannot_be_rebuilt(self) -> None:
        def refuse() -> None:
            raise LookupError("not here")

        class Once:
            def __reduce__(self) -> Any:
                return refuse, ()

        (outcome,) = run(Once, ranks=1)
        assert isinstance(outcome.error, LookupError)
        assert "rank 0" in "".join(outcome.error.__notes__)

    @pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt()])
    def test_exits_are_errors_too(self, error: BaseException) -> None:
        (outcome,) = run(fail_on, 0, error, ranks=1)
        assert type(outcome.error) is type(error)


def pause_on(pausing: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Waits for ever on one rank, and calls `fn` on the others."""
    return signal.pause() if rank() == pausing else fn(*args)


class TestEnds:
    @pytest.mark.parametrize(
        ("leave", "code"),
        [
            (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
            (lambda: os._exit(0), 0),
            (lambda: os._exit(9), 9),
        ],
    )
    def test_rank_that_leaves_without_a_word(self, leave: Callable[[], None], code: int) -> None:
        exits: dict[int, int] = {}
        outcomes = run(lambda: rank() or leave(), on_exit=exits.__setitem__)
        silent, good = outcomes
        assert (silent.value, silent.error, silent.exit_code) == (None, None, code)
        assert silent.failed
        assert good.value == 1
        assert exits == {0: code, 1: 0}

    def test_exit_is_told_while_others_wait_for_it(self, fifo: Path) -> None:
        def fn() -> str:
            if rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return fifo.read_text()

        def tell(gone: int, code: int) -> None:
            if gone == 0:
                fifo.write_text(f"{gone} ended with {code}")

        assert run(fn, on_exit=tell)[1].value == "0 ended with -9"

    def test_others_are_killed_after_the_grace(self) -> None:
        failed, killed = run(pause_on, 1, fail_on, 0, ValueError("first"), grace=0.1)
        assert isinstance(failed.error, ValueError)
        assert (killed.error, killed.exit_code) == (None, -signal.SIGKILL)
        assert killed.is_echo
        assert "ran on for 0.1 s" in killed.fate
        assert failed.failed_at is not None
        assert killed.failed_at is not None
        assert failed.failed_at < killed.failed_at

    def test_stopped_rank_is_killed_too(self) -> None:
        def fn() -> None:
            os.kill(os.getpid(), signal.SIGSTOP if rank() else signal.SIGKILL)

        outcomes = run(fn, grace=1000.0)  # it could not use the time
        assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
        assert [outcome.is_echo for outcome in outcomes] == [False, False]
        assert "stopped (SIGSTOP)" in outcomes[1].fate

    def test_rank_that_does_not_end_keeps_its_result(self) -> None:
        outcomes = run(rank, entry="worker_of_test:lingering", grace=0.1)
        assert [outcome.value for outcome in outcomes] == [0, 1]
        assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2

    def test_rank_that_can_no_longer_speak_has_failed(self) -> None:
        (outcome,) = run(rank, ranks=1, entry="worker_of_test:silent", grace=0.1)
        assert outcome.failed
        assert outcome.exit_code == -signal.SIGKILL

    def test_foreign_bytes_in_the_channel_are_named(self) -> None:
        with pytest.raises(Exception, match="a rank's channel should start with"):
            run(rank, ranks=1, entry="worker_of_test:babbling")

    def test_process_left_by_a_rank_does_not_hide_its_end(self, fifo: Path) -> None:
        def fn() -> None:
            if os.fork() == 0:  # holds a copy of the channel
                fifo.read_text()
                os._exit(0)
            os._exit(3)

        (outcome,) = run(fn, ranks=1)
        assert outcome.exit_code == 3
        fifo.write_text("")

    def test_interrupt_kills_all_and_goes_on(self, fifo: Path) -> None:
        def fn() -> None:
            if rank() == 0:
                fifo.read_text()  # until the other has a pid
            else:
                fifo.write_text("started")
                signal.pause()

        def interrupt(gone: int, code: int) -> None:
            raise KeyboardInterrupt

        children = Path(f"/proc/{fork_server().pid}/task/{fork_server().pid}/children")
        before = children.read_text()  # worlds of other tests stay up
        with pytest.raises(KeyboardInterrupt):
            run(fn, on_exit=interrupt)
        assert children.read_text() == before

    def test_server_killed_in_the_middle(self) -> None:
        def kill_server(gone: int, code: int) -> None:
            if gone == 0:
                os.kill(fork_server().pid, signal.SIGKILL)

        outcomes = run(pause_on, 1, os._exit, 4, on_exit=kill_server)
        assert [outcome.exit_code for outcome in outcomes] == [4, -signal.SIGKILL]
        assert isinstance(outcomes[1].error, LaunchError)
        assert "fork server" in str(outcomes[1].error)
        fork_server()
        leaks.baseline()
        assert values(run(rank)) == [0, 1]

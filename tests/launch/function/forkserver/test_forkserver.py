"""The forkserver: what a child gets from its caller, how its end is told, and who outlives whom."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import leaks
import shoal
from shoal.errors import LaunchError
from shoal.launch.function.forkserver.forkserver import Child, ForkServer, fork_server
from shoal.system.memory_file import MemoryFile

PATIENCE = 60.0
SOURCE = str(Path(shoal.__file__).resolve().parents[1])
Spawn = Callable[..., Child]


@pytest.fixture(autouse=True)
def server_is_up() -> None:
    """The process's own server stays for later tests; everything else must go."""
    fork_server()
    leaks.baseline()


@pytest.fixture
def spawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawn]:
    """Starts a child from the source of its entry point, and ends it with the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    children: list[Child] = []

    def start(
        source: str, payload: bytes | MemoryFile = b"", env: Mapping[str, str] = os.environ
    ) -> Child:
        name = f"entry_{len(children)}_{os.getpid()}"
        body = textwrap.indent(textwrap.dedent(source), "    ")
        header = "import os, signal, sys, time\n\ndef main(channel, payload):\n"
        (tmp_path / f"{name}.py").write_text(header + body)
        children.append(fork_server().spawn(f"{name}:main", payload, env))
        return children[-1]

    yield start
    for child in children:
        child.close()


def answer(child: Child) -> str:
    """All that a child sends before it ends."""
    child.channel.settimeout(PATIENCE)
    pieces = []
    while piece := child.channel.recv(1 << 16):
        pieces.append(piece)
    assert child.wait(PATIENCE) == 0
    return b"".join(pieces).decode()


def has_ended(pidfd: int) -> bool:
    """Whether a process ends in time; takes the descriptor with it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(PATIENCE * 1000))
    os.close(pidfd)
    return ended


def count_descriptors(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class TestCall:
    def test_entry_gets_payload_and_its_return_is_the_exit_code(self, spawn: Spawn) -> None:
        child = spawn("channel.sendall(payload[::-1]); return 7", b"abc")
        assert child.channel.recv(3) == b"cba"
        assert child.wait(PATIENCE) == 7
        assert child.wait(0) == 7

    def test_payload_of_many_megabytes_is_shared_by_children(self, spawn: Spawn) -> None:
        size = 64 << 20
        with MemoryFile(bytes(size - 1) + b"x") as payload:
            source = "channel.sendall(f'{len(payload)} {payload[-1:]}'.encode())"
            children = [spawn(source, payload) for _ in range(2)]
        assert [answer(child) for child in children] == [f"{size} b'x'"] * 2

    def test_environment_is_replaced_entirely(
        self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHOAL_TEST_CALLER", "1")
        child = spawn("channel.sendall(repr(dict(os.environ)).encode())", env={"ONLY": "this"})
        assert eval(answer(child)) == {"ONLY": "this"}

    def test_directory_path_and_arguments_are_those_at_the_call(
        self, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spawn("pass").wait(PATIENCE)  # the server exists before the changes
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("/some/where")
        monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
        child = spawn("channel.sendall(repr((os.getcwd(), sys.path, sys.argv)).encode())")
        assert eval(answer(child)) == (str(tmp_path), sys.path, ["prog", "--flag"])

    def test_removed_directory_does_not_matter(
        self, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert answer(spawn("channel.sendall(b'started')")) == "started"

    def test_output_goes_where_the_callers_goes_now(
        self, spawn: Spawn, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for text in ("one", "two"):
            source = f"print('{text}'); print('{text}!', file=sys.stderr); os.write(1, b'')"
            assert spawn(source).wait(PATIENCE) == 0
            captured = capfd.readouterr()
            assert (captured.out, captured.err) == (f"{text}\n", f"{text}!\n")

    def test_uncaught_exception_prints_its_traceback(
        self, spawn: Spawn, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert spawn("raise ValueError('boom')").wait(PATIENCE) == 1
        error = capfd.readouterr().err
        assert "ValueError: boom" in error
        assert "server.py" not in error

    @pytest.mark.parametrize(("argument", "code"), [("3", 3), ("", 0), ("'no'", 1), ("-1", 255)])
    def test_sys_exit_keeps_its_meaning(self, spawn: Spawn, argument: str, code: int) -> None:
        assert spawn(f"sys.exit({argument})").wait(PATIENCE) == code

    def test_unknown_entry_is_an_error_of_the_child(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with fork_server().spawn("no_such_module:main", b"", os.environ) as child:
            assert child.wait(PATIENCE) == 1
        assert "no_such_module" in capfd.readouterr().err

    def test_exit_functions_of_the_child_run(
        self, spawn: Spawn, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert spawn("import atexit; atexit.register(print, 'bye')").wait(PATIENCE) == 0
        assert capfd.readouterr().out == "bye\n"


class TestFreshness:
    def test_server_has_one_thread_and_its_imports(self, spawn: Spawn) -> None:
        source = """
        tasks = len(os.listdir(f"/proc/{os.getppid()}/task"))
        channel.sendall(f"{tasks} {'torch' in sys.modules} {'numpy' in sys.modules}".encode())
        """
        assert answer(spawn(source)) == "1 True True"

    def test_random_numbers_differ_and_torchs_are_the_default(self, spawn: Spawn) -> None:
        source = """
        import random, numpy, torch
        draws = (random.random(), numpy.random.rand(), torch.rand(1).item())
        channel.sendall(repr(draws).encode())
        """
        first, second = (eval(answer(spawn(source))) for _ in range(2))
        assert first[0] != second[0]
        assert first[1] != second[1]
        assert first[2] == second[2]

    @pytest.mark.parametrize("threads", ["1", "3"])
    def test_number_of_threads_is_the_childs(self, spawn: Spawn, threads: str) -> None:
        source = """
        import torch
        x = torch.ones(300, 300)
        channel.sendall(f"{torch.get_num_threads()} {(x @ x).sum().item():.0f}".encode())
        """
        env = {**os.environ, "OMP_NUM_THREADS": threads}
        assert answer(spawn(source, env=env)) == f"{threads} 27000000"

    def test_signal_handlers_are_the_default(self, spawn: Spawn) -> None:
        source = """
        found = [signal.getsignal(n) for n in (signal.SIGCHLD, signal.SIGTERM)]
        assert found == [signal.SIG_DFL] * 2, found
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1
        """
        assert spawn(source).wait(PATIENCE) == 0

    def test_child_holds_no_descriptors_of_the_server(self, spawn: Spawn) -> None:
        spawn("signal.pause()")  # another child, whose status pipe the server holds
        source = "channel.sendall(repr(sorted(map(int, os.listdir('/proc/self/fd')))).encode())"
        found = eval(answer(spawn(source)))
        assert len(found) == 5, found  # three streams, the channel and the listing itself

    def test_main_module_is_empty(self, spawn: Spawn) -> None:
        source = "import __main__; channel.sendall(repr(hasattr(__main__, 'serve')).encode())"
        assert answer(spawn(source)) == "False"


class TestEnd:
    def test_handle_becomes_readable_with_the_end(self, spawn: Spawn) -> None:
        child = spawn("channel.recv(1); os._exit(5)")
        assert child.wait(0) is None
        assert select.select([child], [], [], 0)[0] == []
        child.channel.sendall(b"x")
        assert select.select([child], [], [], PATIENCE)[0] == [child]
        assert child.wait(0) == 5

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_kill_gives_the_negative_signal(self, spawn: Spawn, number: int) -> None:
        child = spawn("channel.sendall(b'x'); signal.pause()")
        child.channel.recv(1)
        child.kill(number)
        assert child.wait(PATIENCE) == -number
        child.kill()  # of one that has ended does nothing

    def test_stopped_child_can_be_killed(self, spawn: Spawn) -> None:
        child = spawn("os.kill(os.getpid(), signal.SIGSTOP)")
        child.kill()
        assert child.wait(PATIENCE) == -signal.SIGKILL

    def test_closing_the_handle_kills(self, spawn: Spawn) -> None:
        child = spawn("signal.pause()")
        pidfd = os.pidfd_open(child.pid)
        child.close()
        assert has_ended(pidfd)

    def test_no_descriptors_leak(self, spawn: Spawn) -> None:
        server = fork_server()
        assert spawn("pass").wait(PATIENCE) == 0
        before = [count_descriptors(pid) for pid in (os.getpid(), server.pid)]
        for number in range(50):
            with server.spawn(f"entry_0_{os.getpid()}:main", b"x", os.environ) as child:
                if number % 2:
                    assert child.wait(PATIENCE) == 0
        with server.spawn(f"entry_0_{os.getpid()}:main", b"x", os.environ) as child:
            assert child.wait(PATIENCE) == 0
        assert count_descriptors(os.getpid()) == before[0]
        assert settles(lambda: count_descriptors(server.pid), before[1])

    def test_threads_may_spawn_at_once(self, spawn: Spawn) -> None:
        spawn("pass").wait(PATIENCE)
        entry, codes = f"entry_0_{os.getpid()}:main", []

        def work() -> None:
            for _ in range(5):
                with fork_server().spawn(entry, b"", os.environ) as child:
                    codes.append(child.wait(PATIENCE))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert codes == [0] * 20


def settles(measure: Callable[[], int], expected: int) -> bool:
    """Whether a count that lags behind (killed children are reaped later) gets there."""
    for _ in range(200):
        if measure() <= expected:
            return True
        select.select([], [], [], 0.05)
    return False


class TestServer:
    def test_children_die_with_it_and_the_next_use_starts_another(
        self, spawn: Spawn, tmp_path: Path
    ) -> None:
        child = spawn("signal.pause()")
        first, pidfd = fork_server(), os.pidfd_open(child.pid)
        os.kill(first.pid, signal.SIGKILL)
        assert child.wait(PATIENCE) == -signal.SIGKILL
        assert has_ended(pidfd)
        assert first._process.wait(PATIENCE) == -signal.SIGKILL
        child.close()
        assert fork_server() is not first
        leaks.baseline()
        assert answer(spawn("channel.sendall(b'again')")) == "again"

    def test_close_ends_server_and_children(self) -> None:
        server = ForkServer()
        child = server.spawn("signal:sigwait", b"", os.environ)
        pidfds = [os.pidfd_open(pid) for pid in (server.pid, child.pid)]
        server.close()
        child.close()
        assert all(has_ended(pidfd) for pidfd in pidfds)

    def test_more_can_be_preloaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "slow.py").write_text("import os\nimported_by = os.getpid()\n")
        (tmp_path / "asks.py").write_text(
            "import os\ndef main(*_): import slow; return slow.imported_by == os.getpid()\n"
        )
        server = ForkServer(preload=["slow", "no_such_module"])
        with server.spawn("asks:main", b"", os.environ) as child:
            assert child.wait(PATIENCE) == 0
        server.close()

    def test_compiler_is_loaded_when_asked_for_and_starts_no_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "compiler.py").write_text(
            "import os, sys\n"
            "def main(*_):\n"
            "    assert len(os.listdir(f'/proc/{os.getppid()}/task')) == 1\n"
            "    return 7 if 'torch._dynamo' in sys.modules else 8\n"
        )
        codes = []
        server = ForkServer()
        for _ in range(3):
            with server.spawn("compiler:main", b"", os.environ) as child:
                codes.append(child.wait(PATIENCE))
            server.load_compiler()
        server.close()
        assert codes == [8, 7, 7]

    def test_failing_server_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        server = ForkServer()
        with pytest.raises(LaunchError, match="forkserver"):
            server.spawn("os:getpid", b"", os.environ)
        server.close()

    def test_other_platforms_are_refused_with_a_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(LaunchError, match="need Linux"):
            ForkServer()


CALLER = """
import os, signal, sys
from shoal.launch.function.forkserver.forkserver import fork_server
server = fork_server()
children = [server.spawn("waiting:main", b"", os.environ) for _ in range(2)]
print(server.pid, *(child.pid for child in children), flush=True)
sys.stdin.read()
"""

FORKING_CALLER = """
import os, sys
from shoal.errors import LaunchError
from shoal.launch.function.forkserver.forkserver import fork_server
server = fork_server()
pid = os.fork()
if pid == 0:
    try:
        server.spawn("done:main", b"", os.environ)
    except LaunchError:
        with fork_server().spawn("done:main", b"", os.environ) as child:
            code = child.wait(60)
        sys.exit(30 + code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 33
with server.spawn("done:main", b"", os.environ) as child:  # still ours
    sys.exit(child.wait(60))
"""


class TestCaller:
    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
        """Runs a script that can import shoal and two entry points."""
        (tmp_path / "waiting.py").write_text(
            "import signal\ndef main(channel, payload): signal.pause()\n"
        )
        (tmp_path / "done.py").write_text("def main(channel, payload): return 3\n")

        def start(source: str) -> subprocess.Popen[str]:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path)])}
            command = [sys.executable, "-c", source]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        with contextlib.ExitStack() as stack:
            yield start

    @pytest.mark.parametrize("killed", [True, False])
    def test_nothing_outlives_it(
        self, start: Callable[[str], subprocess.Popen[str]], killed: bool
    ) -> None:
        caller = start(CALLER)
        assert caller.stdout is not None
        assert caller.stdin is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in caller.stdout.readline().split()]
        assert len(pidfds) == 3
        if killed:
            caller.kill()
        else:
            caller.stdin.close()
        assert caller.wait(PATIENCE) == (-signal.SIGKILL if killed else 0)
        assert [has_ended(pidfd) for pidfd in pidfds] == [True] * 3

    def test_forked_process_has_a_server_of_its_own(
        self, start: Callable[[str], subprocess.Popen[str]]
    ) -> None:
        assert start(FORKING_CALLER).wait(120) == 3

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import leaks

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def found(watch):
    return "\n".join(watch.leaks(grace=0))


def test_a_clean_test_passes_and_costs_little():
    watch = leaks.Watch()
    assert watch.leaks() == []
    seconds = min(_timed(lambda: leaks.Footprint().beyond(leaks.Footprint())) for _ in range(20))
    assert seconds < 0.05


def _timed(function):
    start = time.process_time()
    function()
    return time.process_time() - start


def test_a_thread_is_found():
    watch, done = leaks.Watch(), threading.Event()
    thread = threading.Thread(target=done.wait, name="straggler")
    thread.start()
    assert "thread 'straggler'" in found(watch)
    done.set()
    thread.join()
    assert found(watch) == ""


def test_a_thread_that_is_about_to_end_gets_a_moment():
    watch = leaks.Watch()
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    assert watch.leaks() == []


def test_a_child_is_found_alive_and_as_a_zombie():
    watch = leaks.Watch()
    with subprocess.Popen(SLEEP) as child:
        assert f"process {child.pid}" in found(watch)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert f"process {child.pid}, state Z" in found(watch)
    assert found(watch) == ""


def test_an_orphan_is_found():
    watch = leaks.Watch()
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2).pid)"
    orphan = int(subprocess.check_output([sys.executable, "-c", start, *SLEEP]))
    assert f"process {orphan}" in found(watch)
    os.kill(orphan, signal.SIGKILL)
    assert watch.leaks() == []


def test_strangers_are_not_our_business():
    watch = leaks.Watch()
    environment = {k: v for k, v in os.environ.items() if k != "SHOAL_TEST_RUN"}
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2).pid)"
    command = [sys.executable, "-c", start, *SLEEP]
    stranger = int(subprocess.check_output(command, env=environment))
    assert f"process {stranger}" not in found(watch)
    os.kill(stranger, signal.SIGKILL)


@pytest.mark.parametrize("keep", ["descriptor", "mapping"])
def test_a_memory_file_is_found(keep):
    watch = leaks.Watch()
    descriptor = os.memfd_create("shoal-leak")
    os.truncate(descriptor, mmap.PAGESIZE)
    if keep == "mapping":
        mapping = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        assert "shared memory: mapping" in found(watch)
        mapping.close()
    else:
        assert "memfd:shoal-leak" in found(watch)
        os.close(descriptor)
    assert found(watch) == ""


def test_a_file_in_dev_shm_is_found():
    watch = leaks.Watch()
    name = f"/dev/shm/shoal-leak-{os.getpid()}"
    with open(name, "w"):
        pass
    assert f"shared memory: {name}" in found(watch)
    os.unlink(name)
    assert found(watch) == ""


def test_a_socket_is_found():
    watch = leaks.Watch()
    with socket.socket():
        assert "socket:[" in found(watch)
    assert found(watch) == ""


def test_a_cycle_that_holds_a_socket_is_collected_first():
    watch = leaks.Watch()
    libc = ctypes.CDLL(None)

    class Holder:
        def __init__(self):
            self.itself, self.descriptor = self, os.dup(0)

        def __del__(self):
            libc.close(self.descriptor)

    Holder()
    assert watch.leaks(grace=0) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: os.environ.update(SHOAL_A="3"), "SHOAL_A: '1' became '3'"),
        (lambda: os.environ.update(SHOAL_B="2"), "SHOAL_B: None became '2'"),
        (lambda: os.environ.pop("SHOAL_A"), "SHOAL_A: '1' became None"),
    ],
)
def test_a_changed_environment_is_found_and_put_back(monkeypatch, change, message):
    monkeypatch.setenv("SHOAL_A", "1")
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0)
    before, complaints = dict(os.environ), []
    with leaks.watched(complaints.append):
        change()
    assert message in complaints[0]
    assert dict(os.environ) == before


def test_a_pool_started_during_a_test_is_not_its_leak():
    complaints = []
    with subprocess.Popen(SLEEP) as earlier, leaks.watched(complaints.append):
        earlier.kill()
        earlier.wait()
        pool = subprocess.Popen(SLEEP)
        leaks.baseline()
    assert complaints == []
    pool.kill()
    pool.wait()


def test_the_fixture_fails_a_leaking_test(tmp_path):
    (tmp_path / "test_leaking.py").write_text(
        "import threading\n"
        "from conftest import nothing_left_behind\n"
        "def test_it():\n"
        "    threading.Thread(target=threading.Event().wait, name='straggler', daemon=True).start()"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "thread 'straggler'" in done.stdout

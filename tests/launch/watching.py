"""Watching a launcher from outside: its lines, and whether its ranks are gone."""

import subprocess
import time
from pathlib import Path

DEADLINE_SECONDS = 60.0

SLEEPER = """
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
print('up', os.getpid(), child.pid, os.environ['SHOAL_ERROR_DIR'], flush=True)
time.sleep(1000)
"""


def words_of(process: subprocess.Popen[str], count: int) -> list[list[str]]:
    """The next `count` lines of a launcher's stdout, split, without the rank."""
    assert process.stdout is not None
    return [process.stdout.readline().split("] ", 1)[1].split() for _ in range(count)]


def assert_gone(pid: int) -> None:
    """Waits for a process to end."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

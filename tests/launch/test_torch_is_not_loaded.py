"""Starting ranks is quick and small: torch is loaded by the ranks and by nobody else.

The probe reads the memory maps of every process that a launch consists of. A process that has
torch's libraries in its maps has loaded torch, however that came about.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

# Fails, so that the launcher also does what it does for a failure. Maps of a process that has
# ended are empty.
SCRIPT = """
def maps(pid):
    try:
        return open(f"/proc/{pid}/maps").read()
    except OSError:
        return ""

def children(pid):
    try:
        found = open(f"/proc/{pid}/task/{pid}/children").read().split()
    except OSError:
        return []
    return [int(child) for child in found] + [each for child in found for each in children(child)]

if os.environ["RANK"] == "0":
    launcher = int(os.environ["LAUNCHER_PID"])
    processes = [launcher, *children(launcher)]
    loaded = [pid for pid in processes if "libtorch" in maps(pid)]
    commands = [open(f"/proc/{pid}/cmdline").read().split("\\0") for pid in loaded]
    print(json.dumps([len(processes), commands]), flush=True)
    sys.exit(3)
time.sleep(1000)
"""

LAUNCHER = """
import atexit, os, sys
os.environ["LAUNCHER_PID"] = str(os.getpid())
atexit.register(lambda: print("at its end:", "torch" in sys.modules, "numpy" in sys.modules))
from shoal.cli import main
main()
"""


KINDS = ("-n 2 --backend shm", "-n 1 --elastic --restarts 0")


@pytest.mark.parametrize(
    "kind", [*KINDS, pytest.param("-n 2 --backend mpi", marks=pytest.mark.mpi)]
)
def test_nobody_loads_torch_when_the_ranks_do_not(script: Callable[[str], str], kind: str) -> None:
    line = f"launch --grace 0 {kind}".split()
    answer = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *line, script(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 3, answer.stderr
    probe, end = answer.stdout.splitlines()
    num_processes, loaded = json.loads(probe.partition("] ")[2])
    assert num_processes >= 3  # launcher, guard, two ranks that may have begun
    assert loaded == []
    assert end == "at its end: False False"

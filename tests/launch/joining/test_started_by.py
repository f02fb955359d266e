"""A script finds its world without changes, whoever started it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.mpi import mpiexec

# In one write, because ranks share what they print to.
SCRIPT = """
import json
import os
import torch
import shoal

with shoal.init({options}) as world:
    total = world.all_reduce(torch.tensor([world.rank + 1.0])).item()
    names = world.all_gather_object(world.backend.name)
os.write(1, ("RESULT " + json.dumps([world.rank, world.size, total, names]) + "\\n").encode())
"""

VENV = Path(sys.executable).parent.parent
MPICH = VENV / "mpich"
DEADLINE_S = 100


@pytest.fixture
def script(tmp_path):
    def write(options=""):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(options=options))
        return str(path)

    return write


def environment(**variables):
    """The test's own environment without what another launcher may have left in it."""
    prefixes = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "SHOAL_")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) or name == "SHOAL_TEST_RUN"
    }
    return {**env, "OMP_NUM_THREADS": "1", **variables}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def results(output):
    lines = [line for line in output.splitlines() if "RESULT " in line]
    return sorted(json.loads(line.partition("RESULT ")[2]) for line in lines)


def run(command, env):
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return results(done.stdout)


def run_ranks(commands_and_envs):
    """Starts processes by hand, as srun or a shell loop would."""
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for command, env in commands_and_envs
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return results("".join(outputs))


def expected(size, backend):
    total = size * (size + 1) / 2
    return [[rank, size, total, [backend] * size] for rank in range(size)]


def test_alone(script):
    assert run([sys.executable, script()], environment()) == expected(1, "shm")


def test_shoal_launch(script):
    command = [str(VENV / "bin" / "shoal"), "launch", "-n", "2", script()]
    assert run(command, environment()) == expected(2, "shm")


def test_torchrun(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), script()]
    assert run(command, environment()) == expected(2, "shm")


def test_plain_variables(script):
    port = str(free_port())
    ranks = [
        environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]
    path = script()
    found = run_ranks([([sys.executable, path], env) for env in ranks])
    assert found == expected(2, "shm")


def test_slurm_variables(script):
    shared = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    path = script()
    ranks = [
        environment(**shared, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)
    ]
    found = run_ranks([([sys.executable, path], env) for env in ranks])
    assert found == expected(2, "shm")


@pytest.mark.mpi
def test_open_mpi(script):
    prefix, variables = mpiexec.command(2)
    found = run([*prefix, sys.executable, script()], environment(**variables))
    assert found == expected(2, "mpi")


@pytest.mark.mpi
@pytest.mark.skipif(not MPICH.exists(), reason="MPICH is not installed: run make setup")
def test_mpich(script):
    variables = {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
    command = [str(MPICH / "bin" / "mpiexec"), "-n", "2", sys.executable, script()]
    assert run(command, environment(**variables)) == expected(2, "mpi")


@pytest.mark.mpi
def test_mpiexec_with_another_backend(script):
    prefix, variables = mpiexec.command(2)
    found = run([*prefix, sys.executable, script("'shm'")], environment(**variables))
    assert found == expected(2, "shm")
